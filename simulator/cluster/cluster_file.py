"""Cluster files: instances, pools, links, outages and scheduling of a simulated cluster, in YAML.

The keys of ``scheduling`` are those of the configuration of `conductor serve`, as are those of instances where
they mean the same.
"""

from __future__ import annotations

import copy
import hashlib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeVar

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from cache_index import Tier
from conductor.catalogue import INSTANCE_CLASSES
from conductor.catalogue.profile_file import read_instance_class
from conductor.cluster_shape import read_cluster_shape
from conductor.codec_config import CodecConfig
from conductor.config import AdmissionConfig, ObjectivesConfig, Positive
from conductor.configuration_faults import ConfigError, did_you_mean, explain, read_yaml
from conductor.costs import DEFAULT_LINKS, Distance, InstanceClass, Speed, Topology
from conductor.link_budgets import LinkBudget
from conductor.placement import Objectives, Role
from conductor.policies import make_policy
from conductor.tier_planner_config import TierPlannerConfig
from simulator.cluster.sizes import Size, read_size
from simulator.cluster.specification import ROLE_LETTERS, ClusterSpec, InstanceSpec, Outage, PoolSpec

DEFAULT_CLASS: Final = "llama-3.1-8b-h100"

_SizeField = Annotated[Size, BeforeValidator(read_size)]
_NotNegative = Annotated[float, Field(ge=0)]
_Count = Annotated[int, Field(ge=1, le=100_000)]
_Name = Annotated[str, Field(min_length=1)]
_SlowerTier = Literal["host", "disk", "pod", "remote"]
_Built = TypeVar("_Built")


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class SpeedSection(_Section):
    """What one transfer costs while nothing else uses the link or the store."""

    bytes_per_s: Positive
    latency_s: _NotNegative = 0.0

    def speed(self) -> Speed:
        return Speed(bytes_per_s=self.bytes_per_s, latency_s=self.latency_s)


class InstanceSection(_Section):
    """``count`` instances alike; see `InstanceSpec` for what their fields mean."""

    name: _Name | None = None
    count: _Count | None = None
    role: Role = Role.MIXED
    instance_class: str = DEFAULT_CLASS
    profile: Path | None = None
    kv_tokens: _SizeField | None = None
    tiers: dict[Literal["host", "disk"], _SizeField] = {}
    codecs: dict[_SlowerTier, CodecConfig] = {}
    write_back: list[_SlowerTier] = []
    pipeline: _Count = 1
    sequences: _Count = 256
    location: str = ""
    fetches_from_peers: bool = False
    streams_layers: bool = False

    @model_validator(mode="after")
    def _one_class(self) -> InstanceSection:
        if self.profile is not None and "instance_class" in self.model_fields_set:
            raise ValueError("give instance_class (a name of the catalogue) or profile (a file), not both")
        if self.instance_class not in INSTANCE_CLASSES:
            hint = did_you_mean(self.instance_class, INSTANCE_CLASSES)
            raise ValueError(f"unknown instance_class {self.instance_class!r}; {hint}")
        Topology().location_ids(self.location, "")
        return self


class PoolSection(SpeedSection):
    """A store of several instances; ``members`` are names of instances, or of groups of them."""

    name: _Name
    tier: Literal["pod", "remote"] = "remote"
    capacity: _SizeField
    members: list[str] | None = None


class OutageSection(_Section):
    """An instance dies at ``at_s`` and is back, empty, ``for_s`` later."""

    instance: str
    at_s: _NotNegative
    for_s: Positive


class TierPlannerSection(TierPlannerConfig):
    """``link_bytes_per_s`` is the most that actions may move over each link, in each direction."""

    link_bytes_per_s: Positive | None = None

    def budget(self) -> LinkBudget:
        """A link may run ahead of its budget by ten seconds' worth."""
        if self.link_bytes_per_s is None:
            return LinkBudget()
        return LinkBudget(bytes_per_s=self.link_bytes_per_s, burst_bytes=10 * self.link_bytes_per_s)


class SchedulingSection(_Section):
    """How requests are placed, as in the configuration of `conductor serve`."""

    policy: str = "slo"
    policy_parameters: dict[str, Any] = {}
    seed: int = 0
    objectives: ObjectivesConfig = ObjectivesConfig()
    admission: AdmissionConfig = AdmissionConfig()
    tier_planner: TierPlannerSection = TierPlannerSection()

    @model_validator(mode="after")
    def _known_policy(self) -> SchedulingSection:
        make_policy(self.policy, self.policy_parameters, self.seed)
        if self.objectives.tbt_share not in (0.1, 1.0):
            raise ValueError(
                f"objectives.tbt_share is {self.objectives.tbt_share:g}: simulations measure the longest tenth of "
                "a request's token gaps (0.1) and all of them (1)"
            )
        return self

    def policy_named(self, policy: str) -> SchedulingSection:
        """The same under another policy; ``policy_parameters`` are kept only by the policy they are for."""
        if policy == self.policy:
            return self
        return self.model_copy(update={"policy": policy, "policy_parameters": {}})

    def objectives_s(self) -> Objectives:
        return Objectives(**self.objectives.model_dump())


class ClusterSection(_Section):
    """A whole cluster file."""

    instances: Annotated[list[InstanceSection], Field(min_length=1)]
    pools: list[PoolSection] = []
    outages: list[OutageSection] = []
    links: dict[Literal["node", "rack", "zone", "site", "world"], SpeedSection] = {}
    prefix_caching: bool = True
    scheduling: SchedulingSection = SchedulingSection()


@dataclass(frozen=True, slots=True)
class ClusterFile:
    """A cluster and how requests are placed on it."""

    cluster: ClusterSpec
    scheduling: SchedulingSection


def read_cluster(path: Path) -> ClusterFile:
    """The cluster that the file describes. Raises ConfigError naming file, key and remedy."""
    return make_cluster(cluster_content(path), path.parent, str(path))


def cluster_content(path: Path) -> dict[str, Any]:
    """What the file says, unchecked but for being a mapping. Raises ConfigError."""
    try:
        content = read_yaml(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ConfigError(f"cannot read the cluster file {path}: {reason}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold a mapping such as 'instances: [{{count: 8}}]'")
    return content


def short_form(text: str, instance_class: str = DEFAULT_CLASS) -> dict[str, Any]:
    """The content of a cluster file for ``8`` (mixed instances) or ``4p4d``. Raises ConfigError."""
    try:
        counts = read_cluster_shape(text)
    except ValueError as error:
        raise ConfigError(
            f"{error}, nor a cluster file: a path that ends in .yaml (docs/simulation.md)"
        ) from None
    return {
        "instances": [
            {"count": count, "role": role.value, "instance_class": instance_class}
            for role, count in counts.items()
        ]
    }


def make_cluster(content: Mapping[str, Any], folder: Path, where: str) -> ClusterFile:
    """The cluster of a file's content; paths in it are relative to ``folder``, errors begin with ``where``.

    Raises ConfigError naming key and remedy.
    """
    try:
        section = ClusterSection.model_validate(copy.deepcopy(dict(content)))
    except ValidationError as error:
        lines = explain(error, ClusterSection)
        raise ConfigError("\n".join(f"{where}: {line}" for line in lines)) from None
    built = _Builder(section, folder, where)
    return ClusterFile(built.cluster(), section.scheduling)


class _Builder:
    def __init__(self, section: ClusterSection, folder: Path, where: str) -> None:
        self._section = section
        self._folder = folder
        self._where = where
        self._groups: dict[str, list[str]] = {}  # names of instances by the name of their group
        self._classes: dict[str, InstanceClass] = {}

    def cluster(self) -> ClusterSpec:
        numbers: Counter[str] = Counter()
        instances = [
            spec
            for i, section in enumerate(self._section.instances)
            for spec in self._instances(f"instances.{i}", section, numbers)
        ]
        self._check_roles({spec.role for spec in instances})
        by_name = {spec.name: spec for spec in instances}
        pools = [self._pool(f"pools.{i}", pool, by_name) for i, pool in enumerate(self._section.pools)]
        links = dict(DEFAULT_LINKS)
        links |= {Distance[name.upper()]: link.speed() for name, link in self._section.links.items()}
        outages = [Outage(each.instance, each.at_s, each.for_s) for each in self._section.outages]
        parts = (tuple(instances), tuple(pools), tuple(outages))
        return self._try("", lambda: ClusterSpec(*parts, links, self._section.prefix_caching))

    def _check_roles(self, roles: set[Role]) -> None:
        """Nothing could be served, and a replay would only say so request by request."""
        if Role.MIXED not in roles and len(roles) == 1:
            (only,) = roles
            other = Role.DECODE if only is Role.PREFILL else Role.PREFILL
            text = f"all of them have the role {only}: add some of role {other}, or make them mixed"
            raise self._error("instances", text)

    def _instances(self, key: str, section: InstanceSection, numbers: Counter[str]) -> list[InstanceSpec]:
        instance_class = self._class(key, section)
        kv_bytes = instance_class.kv_bytes_per_token
        stored_bytes = instance_class.stored_bytes_per_token
        for tier in section.tiers:
            if Tier[tier.upper()] not in instance_class.tiers:
                raise self._error(
                    f"{key}.tiers.{tier}",
                    f"class {instance_class.name!r} has no speed for this tier; give one in its profile: "
                    f"'tiers: {{{tier}: {{bytes_per_s: 5.0e10, latency_s: 2.0e-4}}}}'",
                )
        made = []
        for name in self._names(section, numbers):
            make = lambda name=name: InstanceSpec(  # noqa: E731
                name=name,
                role=section.role,
                instance_class=instance_class,
                kv_tokens=(
                    section.kv_tokens.tokens(kv_bytes)
                    if section.kv_tokens is not None
                    else instance_class.kv_capacity_tokens
                ),
                tier_tokens={
                    (own := Tier[tier.upper()]): size.tokens(stored_bytes(own))
                    for tier, size in section.tiers.items()
                },
                pipeline=section.pipeline,
                sequences=section.sequences,
                location=section.location,
                fetches_from_peers=section.fetches_from_peers,
                streams_layers=section.streams_layers,
                write_back=frozenset(Tier[tier.upper()] for tier in section.write_back),
            )
            made.append(self._try(key, make))
        return made

    def _names(self, section: InstanceSection, numbers: Counter[str]) -> list[str]:
        prefix = section.name or ROLE_LETTERS[section.role]
        if section.name is not None and section.count is None:
            names = [prefix]
        else:
            first = numbers[prefix]
            names = [f"{prefix}{first + i}" for i in range(section.count or 1)]
            numbers[prefix] += len(names)
        self._groups.setdefault(prefix, []).extend(names)
        return names

    def _class(self, key: str, section: InstanceSection) -> InstanceClass:
        if section.profile is None:
            found = INSTANCE_CLASSES[section.instance_class]
        else:
            profile = self._folder / section.profile
            found = self._try(f"{key}.profile", lambda: read_instance_class(profile))
        found = self._encoding(key, found, section.codecs)
        if self._classes.setdefault(found.name, found) != found:
            raise self._error(
                key,
                f"two classes with different figures are called {found.name!r}; rename one in its profile",
            )
        return found

    def _encoding(
        self, key: str, instance_class: InstanceClass, codecs: Mapping[_SlowerTier, CodecConfig]
    ) -> InstanceClass:
        """The class with these codecs, under a name of its own."""
        if not codecs:
            return instance_class
        tiers = dict(instance_class.tiers)
        for name, codec in codecs.items():
            tier = Tier[name.upper()]
            if tier not in tiers:
                raise self._error(
                    f"{key}.codecs.{name}", f"class {instance_class.name!r} has no speed for this tier"
                )
            tiers[tier] = replace(tiers[tier], codec=codec.codec())
        listed = [f"{name} {codec.model_dump_json()}" for name, codec in sorted(codecs.items())]
        digest = hashlib.sha256("\n".join(listed).encode()).hexdigest()[:6]
        return replace(instance_class, name=f"{instance_class.name}+{digest}", tiers=tiers)

    def _pool(self, key: str, section: PoolSection, instances: dict[str, InstanceSpec]) -> PoolSpec:
        names = list(instances)
        if section.members is not None:
            names = []
            for member in section.members:
                if member not in self._groups and member not in instances:
                    hint = did_you_mean(member, [*self._groups, *instances])
                    raise self._error(
                        f"{key}.members", f"no instance or group of instances is called {member!r}; {hint}"
                    )
                names += self._groups.get(member, [member])
        tier = Tier[section.tier.upper()]
        sizes = {instances[name].instance_class.stored_bytes_per_token(tier) for name in names}
        if section.capacity.in_bytes and len(sizes) != 1:
            raise self._error(f"{key}.capacity", "its members differ in the KV bytes of a token; give tokens")
        members = None if section.members is None else frozenset(names)
        capacity_tokens = section.capacity.tokens(max(sizes, default=1.0))
        return self._try(
            key,
            lambda: PoolSpec(section.name, tier, capacity_tokens, section.speed(), members),
        )

    def _try(self, key: str, build: Callable[[], _Built]) -> _Built:
        try:
            return build()
        except ValueError as error:
            raise self._error(key, str(error)) from None

    def _error(self, key: str, text: str) -> ConfigError:
        return ConfigError(f"{self._where}: {key}: {text}" if key else f"{self._where}: {text}")
