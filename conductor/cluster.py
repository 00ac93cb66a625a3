"""The live cluster as the scheduler knows it: instances, their ranks, health, and the load placed on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from struct import Struct
from typing import Final
from urllib.parse import urlsplit

from cache_index import Holder
from conductor.circuit import Circuit
from conductor.costs import ClusterTables, InstanceClass, Topology
from conductor.costs import tables as t
from conductor.placement import ModelCard, PrefixPlan, Role, Target
from conductor.rank import NO_ROW, PlacedElsewhere, RankState, ReportedLoad

DEFAULT_BLOCK_SIZE = 16

# Writes a rank's gauges into its row of the load table, in a quarter of an assignment's time.
_pack_gauges: Final[Callable[..., None]] = Struct(f"{t.STORED_TOKENS - t.REPORTED_RUNNING}d").pack_into
MAY_TRY: Final = "the suspension is over; one request may try"
_ROW_BYTES: Final = 8 * t.LOAD_COLUMNS
_GAUGES_BYTES: Final = 8 * t.REPORTED_RUNNING  # before them in a row


class Health(StrEnum):
    """Whether an instance is a candidate."""

    STARTING = "starting"  # configured, not answered yet
    UP = "up"
    SUSPENDED = "suspended"  # answers its health check but failed requests; may be tried again after a pause
    PROBING = "probing"  # after that pause: takes one request, whose end decides
    WITHHELD = "withheld"  # works as far as is known, but whoever lists it says that it is to get no requests
    DRAINING = "draining"  # finishes what was placed on it and leaves the cluster
    DOWN = "down"


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model or LoRA adapter that an engine lists; ``parent`` is the base model of an adapter.

    ``root`` is the path or repository it was loaded from, under which LMCache stores its KV.
    """

    name: str
    parent: str | None = None
    max_model_len: int | None = None
    root: str | None = None


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


@dataclass(slots=True)
class InstanceState:
    """A routable engine endpoint with its role, its facts and its ranks."""

    instance_id: str
    url: str
    role: Role
    instance_class: InstanceClass
    protocol: str
    ranks: list[RankState]
    location: str = ""  # site/zone/rack/node, the last parts optional
    fetches_from_peers: bool = False  # its connector can pull a prefix from another instance
    streams_layers: bool = False  # its connector overlaps transfers with compute, layer by layer
    health: Health = Health.STARTING
    health_reason: str = "not probed yet"
    facts: EngineFacts | None = None
    block_size_override: int | None = None
    circuit: Circuit = field(default_factory=Circuit)
    draining: bool = False
    withheld: str | None = None  # why it is to get no requests for now

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
        if self.health is Health.SUSPENDED and now_s >= self.circuit.suspended_until_s:
            self.health, self.health_reason = Health.PROBING, MAY_TRY
        return self.health is Health.UP or self.health is Health.PROBING


def make_instance(
    *,
    instance_id: str,
    url: str,
    role: Role,
    instance_class: InstanceClass,
    protocol: str,
    bootstrap_port: int = 8998,
    ranks: int = 1,
    block_size: int | None = None,
    api_key: str | None = None,
    location: str = "",
    fetches_from_peers: bool = False,
    streams_layers: bool = False,
) -> InstanceState:
    """An instance that has not been probed yet. Raises ValueError when the URL is not http(s)://host:port."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(
            f"instance {instance_id!r}: url {url!r} must look like http://host:port or https://host:port"
        )
    tls = parts.scheme == "https"
    port = parts.port or (443 if tls else 80)
    base_url = f"{parts.scheme}://{parts.hostname}:{port}"
    states = [
        RankState(
            holder=Holder(instance_id, rank),
            target=Target(
                instance_id=instance_id,
                url=base_url,
                host=parts.hostname,
                port=port,
                rank=rank,
                ranks=ranks,
                protocol=protocol,
                bootstrap_port=bootstrap_port,
                tls=tls,
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
        location=location,
        fetches_from_peers=fetches_from_peers,
        streams_layers=streams_layers,
    )


class Cluster:
    """All instances by id, in the order they were added, and the tables that estimates read.

    ``version`` grows whenever the set of candidates may have changed.
    """

    def __init__(self, topology: Topology | None = None) -> None:
        self.version = 0
        self.topology = topology or Topology()
        self.tables = ClusterTables(self.topology.link_table(), self.topology.pool_links)
        self._instances: dict[str, InstanceState] = {}
        # By id; the dictionary's own method, for it is asked several times a request.
        self.get: Callable[[str], InstanceState | None] = self._instances.get
        self._free_rows: list[int] = []
        self._rows = 0

    def add(self, instance: InstanceState) -> None:
        """Raises ValueError for an id that is taken, or a location that is no path."""
        if instance.instance_id in self._instances:
            raise ValueError(f"instance id {instance.instance_id!r} is used twice; ids must be unique")
        location = self.topology.location_ids(instance.location, instance.instance_id)
        pools = self.topology.pool_numbers(instance.instance_id)
        self._instances[instance.instance_id] = instance
        for rank in instance.ranks:
            row = self._free_rows.pop() if self._free_rows else self._rows
            self._rows = max(self._rows, row + 1)
            self.tables.make_row(row)
            facts = self.tables.ranks[row]
            facts[t.CLASS] = self.tables.class_id(instance.instance_class)
            facts[t.FETCHES] = instance.fetches_from_peers
            facts[t.STREAMS_LAYERS] = instance.streams_layers
            facts[t.POOL : t.LOCATION] = pools
            facts[t.LOCATION :] = location
            rank.take_row(self.tables, row)
        self._write_capacity(instance)
        self.version += 1

    def remove(self, instance_id: str) -> InstanceState:
        """Take an instance out; its rows are given to others. Raises KeyError when it is unknown."""
        instance = self._instances.pop(instance_id)
        for rank in instance.ranks:
            self._free_rows.append(rank.row)
            rank.take_row(self.tables, NO_ROW)  # placements under way still keep its books
        self.version += 1
        return instance

    def load(self, rank: RankState, plan: PrefixPlan, now_s: float) -> None:
        """To be called when a placement will load what its plan says."""
        if len(self.tables.pools) and rank.row != NO_ROW and plan.fetch_s > 0.0:
            own = (
                (part.tier, part.stop - part.start) for part in plan.segments if part.holder == rank.holder
            )
            self.tables.take_pool_links(rank.row, own, now_s)

    def place_elsewhere(self, placed: Mapping[Holder, PlacedElsewhere]) -> None:
        """What others have placed, in place of what they told before. Ranks that are not known are left out."""
        for instance in self:
            for rank in instance.ranks:
                others = placed.get(rank.holder)
                if others != rank.elsewhere:
                    rank.place_elsewhere(others)

    def report(self, rank: RankState, load: ReportedLoad | None) -> None:
        """Gauges of one rank, polled or pushed; None when they are no longer known."""
        rank.reported = load
        loads, at = self.tables.loads, rank.row * _ROW_BYTES + _GAUGES_BYTES
        if load is not None:
            _pack_gauges(loads, at, load.running, load.waiting, load.kv_usage)
        else:
            _pack_gauges(loads, at, -1.0, -1.0, -1.0)

    def set_facts(self, instance: InstanceState, facts: EngineFacts) -> None:
        """What a probe found."""
        instance.facts = facts
        self._write_capacity(instance)
        self.version += 1

    def _write_capacity(self, instance: InstanceState) -> None:
        blocks = instance.facts.kv_capacity_blocks if instance.facts is not None else None
        size = instance.block_size
        for rank in instance.ranks:
            row = self.tables.ranks[rank.row]
            row[t.CAPACITY_KNOWN] = blocks is not None and size is not None
            if blocks is not None and size is not None:
                row[t.CAPACITY_TOKENS] = blocks * size
            else:
                row[t.CAPACITY_TOKENS] = instance.instance_class.kv_capacity_tokens

    def set_health(self, instance: InstanceState, health: Health, reason: str) -> None:
        """Every change of an instance's health after it was added."""
        instance.health, instance.health_reason = health, reason
        self.version += 1

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
