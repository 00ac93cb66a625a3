"""The live cluster as the scheduler knows it: instances, their ranks, health, and the load placed on them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from urllib.parse import urlsplit

from cache_index import Holder
from conductor.costs import InstanceClass
from conductor.placement import ModelCard, Role, Target

DEFAULT_BLOCK_SIZE = 16


class Health(StrEnum):
    """Whether an instance is a candidate."""

    STARTING = "starting"  # configured, not answered yet
    UP = "up"
    SUSPENDED = "suspended"  # answers its health check but failed requests; a candidate again after a pause
    DOWN = "down"


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model or LoRA adapter that an engine lists; ``parent`` is the base model of an adapter."""

    name: str
    parent: str | None = None
    max_model_len: int | None = None


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What an engine says of itself when it is probed."""

    models: tuple[ServedModel, ...]
    block_size: int | None = None
    kv_capacity_blocks: int | None = None
    publishes_events: bool = False

    @property
    def base_model(self) -> str:
        """The model that LoRA adapters extend."""
        return next((m.name for m in self.models if m.parent is None), self.models[0].name)


@dataclass(frozen=True, slots=True)
class ReportedLoad:
    """Gauges of one rank, as its engine reported them at ``at_s``."""

    running: int
    waiting: int
    kv_usage: float
    at_s: float


@dataclass(frozen=True, slots=True)
class PendingPrefill:
    """A prefill placed on a rank; ``observed`` when its end will be seen (it streams, or it hands off)."""

    predicted_s: float
    observed: bool


@dataclass(slots=True)
class RankState:
    """One data-parallel rank: what was placed on it and has not ended, and what its engine reports.

    Prefills run first come, first served; ``head_since_s`` is when the first of them began.
    """

    holder: Holder
    target: Target
    row: int = 0  # in the scheduler's load table, given by the cluster
    prefills: dict[str, PendingPrefill] = field(default_factory=dict)  # by placement, in order
    head_since_s: float = 0.0
    decodes: dict[str, int] = field(default_factory=dict)  # placement -> context tokens
    context_tokens: int = 0
    placements: int = 0
    reported: ReportedLoad | None = None

    def queue_s(self, now_s: float) -> float:
        """Seconds until a prefill placed now would begin.

        One whose end will be observed is still running when its predicted end has passed; the others are taken
        to end as predicted, and are forgotten then.
        """
        self._forget_ended(now_s)
        end_s = self.head_since_s
        for pending in self.prefills.values():
            end_s += pending.predicted_s
            if pending.observed:
                end_s = max(end_s, now_s)
        return max(end_s - now_s, 0.0) if self.prefills else 0.0

    def _forget_ended(self, now_s: float) -> None:
        """Drop leading prefills that nobody will see the end of and that ended by prediction."""
        while self.prefills:
            placement_id, head = next(iter(self.prefills.items()))
            if head.observed or self.head_since_s + head.predicted_s > now_s:
                return
            self.head_since_s += head.predicted_s
            del self.prefills[placement_id]

    def add_prefill(self, placement_id: str, pending: PendingPrefill, now_s: float) -> None:
        self._forget_ended(now_s)
        if not self.prefills:
            self.head_since_s = now_s
        self.prefills[placement_id] = pending

    def end_prefill(self, placement_id: str, now_s: float) -> float | None:
        """Take a prefill off the queue; returns its service time in seconds where that is known.

        It is known for the head of the queue: since the one before it ended.
        """
        self._forget_ended(now_s)
        if placement_id not in self.prefills:
            return None
        was_head = next(iter(self.prefills)) == placement_id
        del self.prefills[placement_id]
        if not was_head:
            return None
        service_s, self.head_since_s = now_s - self.head_since_s, now_s
        return service_s

    def add_decode(self, placement_id: str, context_tokens: int) -> None:
        self.decodes[placement_id] = context_tokens
        self.context_tokens += context_tokens

    def end_decode(self, placement_id: str) -> None:
        self.context_tokens -= self.decodes.pop(placement_id, 0)


@dataclass(slots=True)
class InstanceState:
    """A routable engine endpoint with its role, its facts and its ranks."""

    instance_id: str
    url: str
    role: Role
    instance_class: InstanceClass
    protocol: str
    ranks: list[RankState]
    health: Health = Health.STARTING
    health_reason: str = "not probed yet"
    facts: EngineFacts | None = None
    block_size_override: int | None = None
    consecutive_failures: int = 0
    suspended_until_s: float = 0.0

    @property
    def block_size(self) -> int | None:
        """Configured, else as the engine tells, else vLLM's default where we keep the books ourselves."""
        if self.block_size_override is not None:
            return self.block_size_override
        if self.facts is None or self.facts.block_size is not None:
            return self.facts.block_size if self.facts else None
        return None if self.facts.publishes_events else DEFAULT_BLOCK_SIZE

    def serves(self, model: str) -> bool:
        return self.facts is not None and any(m.name == model for m in self.facts.models)

    def served_model(self, model: str) -> ServedModel:
        assert self.facts is not None
        return next(m for m in self.facts.models if m.name == model)

    def is_candidate(self, now_s: float) -> bool:
        """Whether requests may be placed here; a suspension that has run out ends with this call."""
        if self.health is Health.SUSPENDED and now_s >= self.suspended_until_s:
            self.health, self.health_reason = Health.UP, "suspension ended"
        return self.health is Health.UP


def make_instance(
    *,
    instance_id: str,
    url: str,
    role: Role,
    instance_class: InstanceClass,
    protocol: str,
    ranks: int = 1,
    block_size: int | None = None,
    api_key: str | None = None,
) -> InstanceState:
    """An instance that has not been probed yet. Raises ValueError when the URL is not http://host:port."""
    parts = urlsplit(url)
    if parts.scheme != "http" or not parts.hostname:
        raise ValueError(f"instance {instance_id!r}: url {url!r} must look like http://host:port")
    base_url = f"http://{parts.hostname}:{parts.port or 80}"
    states = [
        RankState(
            holder=Holder(instance_id, rank),
            target=Target(
                instance_id=instance_id,
                url=base_url,
                host=parts.hostname,
                port=parts.port or 80,
                rank=rank,
                ranks=ranks,
                protocol=protocol,
                api_key=api_key,
            ),
        )
        for rank in range(ranks)
    ]
    return InstanceState(
        instance_id=instance_id,
        url=base_url,
        role=role,
        instance_class=instance_class,
        protocol=protocol,
        ranks=states,
        block_size_override=block_size,
    )


class Cluster:
    """All instances by id, in the order they were added.

    ``version`` grows whenever the set of candidates may have changed.
    """

    def __init__(self) -> None:
        self.version = 0
        self._instances: dict[str, InstanceState] = {}
        self._rows = 0

    def add(self, instance: InstanceState) -> None:
        """Raises ValueError for an id that is taken."""
        if instance.instance_id in self._instances:
            raise ValueError(f"instance id {instance.instance_id!r} is used twice; ids must be unique")
        self._instances[instance.instance_id] = instance
        for rank in instance.ranks:
            rank.row = self._rows
            self._rows += 1
        self.version += 1

    def set_health(self, instance: InstanceState, health: Health, reason: str) -> None:
        """Every change of an instance's health after it was added."""
        instance.health, instance.health_reason = health, reason
        self.version += 1

    def get(self, instance_id: str) -> InstanceState | None:
        return self._instances.get(instance_id)

    def __getitem__(self, instance_id: str) -> InstanceState:
        return self._instances[instance_id]

    def __iter__(self) -> Iterator[InstanceState]:
        return iter(self._instances.values())

    def __len__(self) -> int:
        return len(self._instances)

    def rank(self, holder: Holder) -> RankState | None:
        instance = self._instances.get(holder.instance_id)
        if instance is None or holder.rank >= len(instance.ranks):
            return None
        return instance.ranks[holder.rank]

    def models(self) -> list[ModelCard]:
        """Every model that a probed instance serves, merged by name, in order of first appearance."""
        cards: dict[str, ModelCard] = {}
        for instance in self:
            if instance.facts is None or instance.health is Health.DOWN:
                continue
            for served in instance.facts.models:
                known = cards.get(served.name)
                lengths = [
                    length
                    for length in (served.max_model_len, known.max_model_len if known else None)
                    if length is not None
                ]
                cards[served.name] = ModelCard(
                    model=served.name,
                    max_model_len=min(lengths) if lengths else None,
                    instances=(known.instances if known else 0) + 1,
                    parent=served.parent,
                )
        return list(cards.values())
