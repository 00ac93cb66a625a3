"""The one configuration model: a YAML file, environment variables and command-line flags, same names everywhere.

Precedence: flags, then ``CONDUCTOR_*`` environment variables (``__`` between levels, for example
``CONDUCTOR_SERVER__PORT=9000``), then the file, then the defaults here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final, Literal

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from cache_index.mooncake import DEFAULT_RECONCILE_S
from conductor.access_config import ApiKeyConfig, SendableSecret, check_names
from conductor.admission import make_rule
from conductor.circuit import SuspensionPolicy
from conductor.cluster_shape import read_cluster_shape
from conductor.configuration_faults import ConfigError, explain, read_yaml
from conductor.discovery_config import DiscoveryConfig
from conductor.endpoint_picker_config import EndpointPickerConfig
from conductor.front_door_config import CorsConfig, EngineTlsConfig, ServerTlsConfig, TracingConfig
from conductor.instance_config import InstanceConfig, catalogued
from conductor.policies import make_policy
from conductor.shared_state_config import SharedStateConfig
from conductor.tier_config import ExecutorsConfig, TiersConfig
from conductor.tier_planner_config import TierPlannerConfig

Positive = Annotated[float, Field(gt=0)]
PortNumber = Annotated[int, Field(ge=0, le=65535)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ServerConfig(_Section):
    """The front door."""

    host: str = "127.0.0.1"
    port: PortNumber = 8000
    workers: Annotated[int, Field(ge=1, le=256)] = 1  # router processes; 1: in the conductor's own
    worker_timeout_s: Annotated[float, Field(ge=2)] = 10.0
    max_body_bytes: Annotated[int, Field(gt=0)] = 64 * 1024 * 1024
    shutdown_grace_s: Positive = 30.0
    admin_token: SendableSecret | None = None
    routers_host: str = "127.0.0.1"
    routers_port: PortNumber | None = None  # where `conductor router` connects; None: nobody can
    console: bool = True  # at /ui
    cors: CorsConfig | None = None
    tls: ServerTlsConfig | None = None

    @model_validator(mode="after")
    def _known_routers(self) -> ServerConfig:
        if self.routers_port is not None and self.admin_token is None:
            raise ValueError("routers_port needs an admin_token, which routers show when they connect")
        return self


class RoutingConfig(_Section):
    """Attempts, deadlines and pools of the data path."""

    max_attempts: Annotated[int, Field(ge=1)] = 3
    retry_ratio: Annotated[float, Field(ge=0, le=1)] = 0.2
    retry_burst: Annotated[float, Field(ge=1)] = 10.0
    hedge_quantile: Annotated[float, Field(gt=0, lt=1)] | None = None
    hedge_least_s: Positive = 0.05
    connect_timeout_s: Positive = 2.0
    prefill_timeout_s: Positive = 300.0
    transfer_timeout_s: Positive = 30.0
    first_byte_timeout_s: Positive = 300.0
    token_cache_bytes: Annotated[int, Field(ge=0)] = 256 * 1024 * 1024
    engine_tls: EngineTlsConfig = EngineTlsConfig()


class ObjectivesConfig(_Section):
    """What a request should meet; ``tbt_share`` as in `Objectives`."""

    ttft_s: Positive = 2.0
    tbt_s: Positive = 0.05
    tbt_share: Annotated[float, Field(gt=0, le=1)] = 0.1


class QueueConfig(_Section):
    """Requests held at the router until an instance is about to run dry; a ``capacity`` of 0 forwards at once."""

    capacity: Annotated[int, Field(ge=0)] = 0
    deadline_s: Positive | None = None
    ageing: Annotated[float, Field(ge=0)] | None = None
    weights: dict[str, Positive] = {}
    hold_above_s: Annotated[float, Field(ge=0)] = 0.01


class AdmissionConfig(_Section):
    """Who is served now, who waits, and who is asked to come back later."""

    rule: str = "accept_all"
    parameters: dict[str, float] = {}
    queue: QueueConfig = QueueConfig()

    @model_validator(mode="after")
    def _known_rule(self) -> AdmissionConfig:
        make_rule(self.rule, self.parameters)
        return self


class SchedulingConfig(_Section):
    """How placements are chosen."""

    policy: str = "slo"
    policy_parameters: dict[str, Any] = {}
    seed: int = 0
    admission: AdmissionConfig = AdmissionConfig()
    objectives: ObjectivesConfig = ObjectivesConfig()
    suspend_after_failures: Annotated[int, Field(ge=1)] = 3
    suspend_s: Positive = 10.0
    suspend_longest_s: Positive = 160.0
    suspend_failure_rate: Annotated[float, Field(gt=0, le=1)] = 0.5
    suspend_min_requests: Annotated[int, Field(ge=1)] = 20
    suspend_window_s: Positive = 30.0
    records: Annotated[int, Field(ge=1)] = 10_000
    reservation_ttl_s: Positive = 600.0
    record: Path | None = None
    record_max_bytes: Annotated[int, Field(ge=1_000_000)] = 4 << 30

    @property
    def suspension(self) -> SuspensionPolicy:
        return SuspensionPolicy(
            after_failures=self.suspend_after_failures,
            pause_s=self.suspend_s,
            longest_pause_s=self.suspend_longest_s,
            failure_rate=self.suspend_failure_rate,
            min_requests=self.suspend_min_requests,
            window_s=self.suspend_window_s,
        )

    @model_validator(mode="after")
    def _known_policy(self) -> SchedulingConfig:
        make_policy(self.policy, self.policy_parameters, self.seed)
        return self


class IndexConfig(_Section):
    """The cache index: its bounds, and how often it is saved to ``state_dir``."""

    max_blocks: Annotated[int, Field(gt=0)] | None = None
    expected_blocks: Annotated[int, Field(ge=0)] = 0
    snapshot_interval_s: Positive = 60.0


class HealthConfig(_Section):
    """Probes of the engines."""

    interval_s: Positive = 1.0
    timeout_s: Positive = 2.0
    unhealthy_after: Annotated[int, Field(ge=1)] = 2


class MasterConfig(_Section):
    """A Mooncake master whose events tell what its pool holds."""

    endpoint: Annotated[str, Field(pattern=r"^tcp://[^*\s]+:\d+$")]
    model: Annotated[str, Field(min_length=1)]
    block_size: Annotated[int, Field(gt=0)]
    topic: str = ""
    admin_endpoint: Annotated[str, Field(pattern=r"^http://[^*\s/]+:\d+$")] | None = None
    reconcile_s: Annotated[float, Field(ge=1)] = DEFAULT_RECONCILE_S


class SharedPoolConfig(_Section):
    """A store that several instances load from; without ``mooncake`` it pushes its events (POST /v1/events)."""

    id: Annotated[str, Field(min_length=1)]
    tier: Literal["pod", "remote"] = "remote"
    members: Annotated[list[str], Field(min_length=1)] | None = None
    bytes_per_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    mooncake: MasterConfig | None = None


class ModelConfig(_Section):
    """What the router knows of a model: the folder of its tokenizer, other names it answers to."""

    name: str
    tokenizer: Path | None = None
    aliases: list[str] = []
    pass_tokens: bool = False


MOST_EMULATED_ENGINES: Final = 1_000
PORTS_OF_AN_ENGINE: Final = 4


class EmulationConfig(_Section):
    """The embedded emulated cluster: `2p2d` is two prefill and two decode instances, `4` four mixed ones."""

    cluster: str | None = None
    protocol: Literal["vllm-nixl", "sglang"] = "vllm-nixl"
    model: str = "emulated-8b"
    profile: str = "llama-3.1-8b-h100"
    base_port: PortNumber = 0
    speed: Positive = 1.0
    block_size: Annotated[int, Field(gt=0)] = 16
    kv_blocks: Annotated[int, Field(gt=0)] = 28_000
    host_blocks: Annotated[int, Field(ge=0)] = 0  # of a host tier; 0: none
    restart_after_s: Annotated[float, Field(ge=0)] = 1.0

    @field_validator("profile")
    @classmethod
    def _known_profile(cls, name: str) -> str:
        return catalogued(name)

    @field_validator("cluster")
    @classmethod
    def _shape(cls, shape: str | None) -> str | None:
        if shape is not None and sum(read_cluster_shape(shape).values()) > MOST_EMULATED_ENGINES:
            raise ValueError(
                f"{shape!r} are too many: each emulated engine is a process, and {MOST_EMULATED_ENGINES} are the "
                "most; conductor replay --cluster simulates larger clusters"
            )
        return shape

    @model_validator(mode="after")
    def _ports_for_all(self) -> EmulationConfig:
        count = sum(read_cluster_shape(self.cluster).values()) if self.cluster is not None else 0
        last = self.base_port + PORTS_OF_AN_ENGINE * count - 1
        if self.base_port and last > 65_535:
            raise ValueError(
                f"base_port: {count} engines take {PORTS_OF_AN_ENGINE} ports each; from {self.base_port} on, the "
                f"last would be {last}; begin lower, or with 0 for free ones"
            )
        return self


class LogConfig(_Section):
    """Structured logs on stderr; `auto` is coloured text on a terminal and JSON lines elsewhere."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["auto", "console", "json"] = "auto"


class Config(BaseSettings):
    """Everything that can be configured."""

    model_config = SettingsConfigDict(
        env_prefix="CONDUCTOR_", env_nested_delimiter="__", extra="forbid", frozen=True
    )

    server: ServerConfig = ServerConfig()
    routing: RoutingConfig = RoutingConfig()
    endpoint_picker: EndpointPickerConfig = EndpointPickerConfig()
    scheduling: SchedulingConfig = SchedulingConfig()
    index: IndexConfig = IndexConfig()
    health: HealthConfig = HealthConfig()
    emulation: EmulationConfig = EmulationConfig()
    log: LogConfig = LogConfig()
    tracing: TracingConfig = TracingConfig()
    models: list[ModelConfig] = []
    instances: list[InstanceConfig] = []
    discovery: DiscoveryConfig = DiscoveryConfig()
    shared_pools: list[SharedPoolConfig] = []
    executors: ExecutorsConfig = ExecutorsConfig()
    tiers: TiersConfig = TiersConfig()
    tier_planner: TierPlannerConfig = TierPlannerConfig()
    api_keys: list[ApiKeyConfig] = []
    shared_state: SharedStateConfig = SharedStateConfig()
    state_dir: Path | None = None

    @model_validator(mode="after")
    def _unique_ids(self) -> Config:
        ids = [instance.id for instance in self.instances]
        twice = sorted({i for i in ids if ids.count(i) > 1})
        if twice:
            raise ValueError(f"instances: the id {twice[0]!r} is used more than once; ids must be unique")
        for pool in self.shared_pools:
            if pool.id in ids:
                raise ValueError(f"shared_pools: the id {pool.id!r} is taken; ids must be unique")
            ids.append(pool.id)
        self._check_executors()
        check_names(self.api_keys)
        return self

    def _check_executors(self) -> None:
        admins = {pool.id: pool.mooncake and pool.mooncake.admin_endpoint for pool in self.shared_pools}
        for pool, store in self.executors.mooncake.items():
            if pool not in admins:
                raise ValueError(f"executors.mooncake: {pool!r} is none of the shared_pools")
            if store.admin_url is None and admins[pool] is None:
                raise ValueError(
                    f"executors.mooncake.{pool}.admin_url is required, for the pool's mooncake.admin_endpoint "
                    "is not given either"
                )
        stranger = next((each for each in self.executors.emulated if each not in self._instance_ids()), None)
        if stranger is not None:
            raise ValueError(f"executors.emulated: {stranger!r} is none of the instances")
        controller = self.executors.lmcache_controller
        known = self._instance_ids()
        unknown = sorted(set(controller.instances) - known) if controller is not None and known else []
        if unknown:
            raise ValueError(
                f"executors.lmcache_controller.instances: {unknown[0]!r} is none of the instances"
            )

    def _instance_ids(self) -> set[str]:
        return {instance.id for instance in self.instances}

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Flags over environment over the file, whose content `load_config` passes as ``_file``."""
        assert isinstance(init_settings, InitSettingsSource)
        given = dict(init_settings.init_kwargs)
        content = given.pop("_file", {})
        return (
            InitSettingsSource(settings_cls, init_kwargs=given),
            env_settings,
            InitSettingsSource(settings_cls, init_kwargs=content),
        )


def _without_excerpt(error: yaml.YAMLError) -> str:
    """Where and why, not the line itself: there may be a key in it."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"line {mark.line + 1}, column {mark.column + 1}: {error.problem}"
    return str(error) if type(error) is yaml.YAMLError else type(error).__name__


def load_config(path: Path | None = None, flags: dict[str, Any] | None = None) -> Config:
    """The effective configuration. ``flags`` is nested like the file and wins over it.

    Raises ConfigError naming file, key and remedy.
    """
    content: Any = {}
    if path is not None:
        try:
            content = read_yaml(path.read_text()) or {}
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is no text in UTF-8"
            raise ConfigError(f"cannot read the configuration file {path}: {reason}") from None
        except yaml.YAMLError as error:
            raise ConfigError(f"{path} is not valid YAML: {_without_excerpt(error)}") from None
        if not isinstance(content, dict):
            raise ConfigError(
                f"{path} must hold a mapping such as 'instances: [...]', not a {type(content).__name__}"
            )
    try:
        return Config(_file=content, **(flags or {}))  # type: ignore[call-arg]
    except ValidationError as error:
        where = str(path) if path is not None else "configuration"
        raise ConfigError("\n".join(f"{where}: {line}" for line in explain(error, Config))) from None
