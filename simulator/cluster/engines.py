"""All engines of a simulated cluster: the compiled model's arrays, made and enlarged as it needs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from cache_index import Tier
from conductor.costs import Distance, Speed, Topology
from simulator.cluster.kernels import layout as k
from simulator.cluster.kernels.arrays import Arrays, Floats, Ints, Words, addresses
from simulator.cluster.kernels.progress import (
    advance,
    compile_all,
    drain,
    drop,
    hand_on,
    kill,
    read_gauges,
    submit,
)
from simulator.cluster.specification import ClusterSpec, InstanceSpec

_INT, _FLOAT = np.int64, np.float64
_UNLIMITED: Final = Speed(bytes_per_s=math.inf, latency_s=0.0)
_SOURCES: Final = (Tier.HOST, Tier.DISK, Tier.POD, Tier.REMOTE)
_ENLARGED: Final = {
    k.SHORT_OF_LOG: ("log_s", "log_steps"),
    k.SHORT_OF_FLOWS: ("flows", "flow_s", "timers", "timer_s"),
    k.SHORT_OF_EVENTS: ("events",),
    k.SHORT_OF_NOTICES: ("notices",),
    k.SHORT_OF_SEGMENTS: ("segments", "segment_gap_s"),
}
_COLUMNS_GROW: Final = ("log_s", "log_steps")  # the others grow by rows
# Columns by which free rows are chained, and the counter that has the first.
_CHAINS: Final = {
    "work": (k.W_NEXT, k.C_FREE_WORK),
    "events": (k.V_NEXT, k.C_FREE_EVENT),
    "segments": (2, k.C_FREE_SEGMENT),
}


@dataclass(frozen=True, slots=True)
class Load:
    """Of one request: its numbers, and where its hashes stand in those of the workload."""

    number: int
    prompt_tokens: int
    output_tokens: int
    first_hash: int
    blocks: int


@dataclass(frozen=True, slots=True)
class Gauges:
    """Of each engine: requests in the batch or on their way into it, those that wait, and the fraction of the
    device that requests have taken (what is merely cached does not count).
    """

    running: NDArray[np.int32]
    waiting: NDArray[np.int32]
    kv_usage: Floats


@dataclass(frozen=True, slots=True)
class StoreChange:
    """Blocks that a store has from now on, or has no more; ``parent`` is the hash before them, 0 for none."""

    store: int
    stored: bool
    hashes: Words
    parent: int


class Engines:
    """Engines by number, in the order of the specification. Times must not go backwards."""

    def __init__(
        self,
        cluster: ClusterSpec,
        hashes: Words,
        *,
        block_tokens: int,
        longest_output_tokens: int,
        step_by_step: bool = False,
    ) -> None:
        compile_all()
        self.stores = tuple(stores_of(cluster))
        self._state = _make_state(cluster, hashes, len(self.stores), block_tokens, longest_output_tokens)
        self._set_stores(cluster, block_tokens)
        self._state.counters[k.C_SINGLE_STEPS] = step_by_step
        self._table = addresses(self._state)
        self._address = self._table.ctypes.data
        self._changes = np.empty((len(self._state.events), 5), _INT)
        self._removed = np.empty(len(self._state.events), np.uint64)

    def submit(
        self, load: Load, engine: int, decode_engine: int, *, plan_blocks: int, peer: int, streams: bool
    ) -> int:
        """Queue a request; `NONE` for a decode engine or a peer that it has not. Returns its work's row."""
        while True:
            work: int = submit(
                self._address,
                load.number,
                engine,
                decode_engine,
                load.prompt_tokens,
                load.output_tokens,
                load.first_hash,
                load.blocks,
                plan_blocks,
                peer,
                int(streams),
            )
            if work != k.NONE:
                return work
            self._enlarge("work", "work_s")

    def hand_on(self, work: int) -> None:
        """The decode leg of a prefill that ended may begin."""
        hand_on(self._address, work)

    def drop(self, work: int, now_s: float) -> None:
        """Give a request up, both legs of it."""
        drop(self._address, work, now_s)

    def kill(self, engine: int, now_s: float) -> None:
        """An engine dies with all it has; requests that need it must have been dropped before."""
        kill(self._address, engine, now_s)

    def needs(self, work: int, engine: int) -> bool:
        """Whether the request has something on an engine still: all but a prefill that was handed off."""
        first = self._state.work[work]
        legs = [first] if first[k.W_PARTNER] == k.NONE else [first, self._state.work[first[k.W_PARTNER]]]
        return any(
            leg[k.W_ENGINE] == engine and not (leg[k.W_STANDS] == k.HELD and leg[k.W_ROOM] == 0)
            for leg in legs
        )

    def advance(self, now_s: float, until_s: float) -> tuple[float, list[list[float]]]:
        """Let time go on until something is to be told, or ``until_s``: when that is, and the notices."""
        counters = self._state.counters
        while True:
            now_s = advance(self._address, now_s, until_s)
            if counters[k.C_SHORT] == k.ENOUGH:
                break
            self._enlarge(*_ENLARGED[int(counters[k.C_SHORT])])
        notices = counters[k.C_NOTICES]
        return now_s, self._state.notices[:notices].tolist() if notices else []

    def changes(self) -> Iterator[StoreChange]:
        """What stores have and have no more since the last call, in order for each of them."""
        if not self._state.counters[k.C_EVENTS]:
            return
        if len(self._changes) < len(self._state.events):
            self._changes = np.empty((len(self._state.events), 5), _INT)
            self._removed = np.empty(len(self._state.events), np.uint64)
        hashes = self._state.hashes
        rows = drain(self._address, self._changes, self._removed)
        for store, stored, start, stop, first in self._changes[:rows].tolist():
            if stored:
                parent = int(hashes[start - 1]) if start > first else 0
                yield StoreChange(store, True, hashes[start:stop], parent)
            else:
                yield StoreChange(store, False, self._removed[start:stop], 0)

    def gauges(self, now_s: float) -> Gauges:
        """What engines would say of themselves now."""
        table = np.empty((len(self._state.engines), 3))
        read_gauges(self._address, now_s, table)
        usage = table[:, 2] / self._state.engines[:, k.E_KV_TOKENS]
        return Gauges(table[:, 0].astype(np.int32), table[:, 1].astype(np.int32), usage)

    @property
    def cached_tokens(self) -> Ints:
        """Of each store: tokens in blocks that can be found, in use or not."""
        state = self._state
        blocks = state.stores[:, k.S_IDLE].copy()
        blocks[state.engines[:, k.E_DEVICE]] += state.engines[:, k.E_REFERRED]
        tokens: Ints = blocks * state.counters[k.C_BLOCK_TOKENS]
        return tokens

    @property
    def busy_s(self) -> Floats:
        seconds: Floats = self._state.speeds[:, k.G_BUSY_S]
        return seconds

    @property
    def computed_tokens(self) -> int:
        """Of prompts, in all."""
        return int(self._state.engines[:, k.E_COMPUTED].sum())

    @property
    def runs(self) -> int:
        """Steps, where several that grew evenly count as one."""
        return int(self._state.engines[:, k.E_RUNS].sum())

    @property
    def idle(self) -> bool:
        """Whether nothing is under way anywhere."""
        return not np.isfinite(self._state.ends[1]) and not self._state.counters[k.C_FLOWS]

    def check_invariants(self) -> None:
        """Assert that no link, device or store has more than it can, and that books agree; for tests."""
        state = self._state
        block_tokens = int(state.counters[k.C_BLOCK_TOKENS])
        live = state.work[state.work[:, k.W_ENGINE] != k.NONE]
        for number, engine in enumerate(state.engines):
            mine = live[live[:, k.W_ENGINE] == number]
            device = state.residencies[:, k.R_STORE] == engine[k.E_DEVICE]
            references = int(state.residencies[device, k.R_REFERENCES].sum())
            assert references == mine[:, k.W_COMMITTED].sum(), "references without an owner"
            referred = int((state.residencies[device, k.R_REFERENCES] > 0).sum())
            assert referred == engine[k.E_REFERRED], "referred blocks are miscounted"
            used = int(device.sum()) * block_tokens + int(engine[k.E_LOOSE])
            assert used <= engine[k.E_KV_TOKENS], f"{used} tokens on a device of {engine[k.E_KV_TOKENS]}"
            decoding = mine[:, k.W_STANDS] == k.DECODING
            assert decoding.sum() == engine[k.E_DECODING], "decodes are miscounted"
            left = mine[:, k.W_END_STEP] - engine[k.E_STEPS]
            context = mine[:, k.W_PROMPT] + mine[:, k.W_OUTPUT] - left
            assert context[decoding].sum() == engine[k.E_CONTEXT], "the context of decodes drifted"
            room = np.where(decoding, context, mine[:, k.W_ROOM]) - mine[:, k.W_COMMITTED] * block_tokens
            assert room.sum() == engine[k.E_LOOSE], "tokens taken without an owner"
            batch = int(engine[[k.E_PREFILLING, k.E_DECODING, k.E_RESERVED]].sum())
            assert batch <= engine[k.E_SEQUENCES], f"{batch} requests in a batch of {engine[k.E_SEQUENCES]}"
        kept = state.residencies[state.residencies[:, k.R_STORE] != k.NONE]
        unused = kept[kept[:, k.R_REFERENCES] == 0]
        idle = np.bincount(unused[:, k.R_STORE], minlength=len(state.stores))
        assert (idle == state.stores[:, k.S_IDLE]).all(), "idle blocks are miscounted"
        assert (idle <= state.stores[:, k.S_CAPACITY]).all(), "a store is over its capacity"
        assert (state.table != k.NONE).sum() == len(kept), "the table of blocks has lost some"
        flows = int(state.counters[k.C_FLOWS])
        users, moved = np.zeros(len(state.links), _INT), np.zeros(len(state.links))
        for flow, seconds in zip(state.flows[:flows], state.flow_s[:flows], strict=True):
            for link in (flow[k.L_GIVER], flow[k.L_TAKER]):
                if link != k.NONE and seconds[k.M_LEFT_BYTES] > 0:
                    users[link] += 1
                    moved[link] += seconds[k.M_BYTES_PER_S]
        assert (users == state.link_flows).all(), "flows over links are miscounted"
        assert (moved <= state.links * (1 + 1e-9)).all(), "a link carries more than it can"

    def _enlarge(self, *names: str) -> None:
        """Twice as many rows, or columns for logs."""
        larger = {}
        for name in names:
            old = getattr(self._state, name)
            axis = 1 if name in _COLUMNS_GROW else 0
            shape = list(old.shape)
            shape[axis] *= 2
            new = np.zeros(shape, old.dtype)
            new[tuple(slice(size) for size in old.shape)] = old
            larger[name] = new
            if name in _CHAINS:
                column, counter = _CHAINS[name]
                _chain(new, column, len(old), int(self._state.counters[counter]))
                self._state.counters[counter] = len(old)
                if name == "work":
                    new[len(old) :, k.W_ENGINE] = k.NONE
        self._state = self._state._replace(**larger)
        self._table = addresses(self._state)
        self._address = self._table.ctypes.data

    def _set_stores(self, cluster: ClusterSpec, block_tokens: int) -> None:
        state = self._state
        for store, place in enumerate(self.stores):
            state.stores[store] = k.NONE
            state.stores[store, k.S_IDLE] = 0
            state.stores[store, k.S_CAPACITY] = place.capacity_tokens // block_tokens
            if place.tier is Tier.DEVICE:
                state.engines[place.owner, k.E_DEVICE] = store
            elif place.tier is Tier.HOST:
                state.engines[place.owner, k.E_HOST] = store
            elif place.tier is Tier.DISK:
                state.engines[place.owner, k.E_DISK] = store
        for number, pool in enumerate(cluster.pools):
            state.pool_source[number] = k.POD if pool.tier is Tier.POD else k.REMOTE
            for engine, instance in enumerate(cluster.instances):
                state.pools[engine, number] = pool.members is None or instance.name in pool.members


@dataclass(frozen=True, slots=True)
class Store:
    """A place for blocks: an instance's tier, or a pool. ``owner`` is their number in the specification."""

    owner: int
    tier: Tier
    capacity_tokens: int


def stores_of(cluster: ClusterSpec) -> Iterator[Store]:
    """All stores of a cluster in the order of their numbers; pools last."""
    for owner, instance in enumerate(cluster.instances):
        yield Store(owner, Tier.DEVICE, instance.kv_tokens)
        for tier, tokens in sorted(instance.tier_tokens.items()):
            yield Store(owner, tier, tokens)
    for owner, pool in enumerate(cluster.pools):
        yield Store(owner, pool.tier, pool.capacity_tokens)


def _make_state(
    cluster: ClusterSpec, hashes: Words, stores: int, block_tokens: int, longest_output_tokens: int
) -> Arrays:
    engines, pools = len(cluster.instances), len(cluster.pools)
    batch = max(instance.sequences for instance in cluster.instances)
    places = (engines, batch)
    residencies = sum(store.capacity_tokens // block_tokens + 1 for store in stores_of(cluster))
    links = k.LINKS_PER_ENGINE * engines + pools
    leaves = 1 << max(engines - 1, 1).bit_length()
    work, segments, events = 256, 2 * batch, 1024
    state = Arrays(
        counters=np.zeros(k.C_COLUMNS, _INT),
        hashes=hashes,
        work=np.full((work, k.W_COLUMNS), k.NONE, _INT),
        work_s=np.full((work, k.F_COLUMNS), np.inf),
        engines=np.zeros((engines, k.E_COLUMNS), _INT),
        speeds=np.zeros((engines, k.G_COLUMNS)),
        ends=np.full(2 * leaves, np.inf),
        touched=np.zeros(engines, _INT),
        prefilling=np.zeros(places, _INT),
        chunk_work=np.zeros(places, _INT),
        chunk_tokens=np.zeros(places, _INT),
        decode_end=np.zeros(places, _INT),
        decode_work=np.zeros(places, _INT),
        silent=np.zeros(places, _INT),
        log_s=np.zeros((engines, 64, 2)),
        log_steps=np.zeros((engines, 64), _INT),
        segments=np.zeros((segments, 3), _INT),
        segment_gap_s=np.zeros(segments),
        stores=np.zeros((stores, k.S_COLUMNS), _INT),
        residencies=np.full((residencies, k.R_COLUMNS), k.NONE, _INT),
        residency_hash=np.zeros(residencies, np.uint64),
        table=np.full(1 << (2 * residencies - 1).bit_length(), k.NONE, _INT),
        pools=np.zeros((engines, pools), _INT),
        pool_source=np.zeros(pools, _INT),
        pool_latency_s=np.array([pool.speed.latency_s for pool in cluster.pools]),
        load_blocks=np.zeros(stores, _INT),
        events=np.zeros((events, k.V_COLUMNS), _INT),
        links=np.full(links, np.inf),
        link_flows=np.zeros(links, _INT),
        distances=np.array([[cluster.links[d].bytes_per_s, cluster.links[d].latency_s] for d in Distance]),
        flows=np.zeros((8 * batch, k.L_COLUMNS), _INT),
        flow_s=np.zeros((8 * batch, k.M_COLUMNS)),
        timers=np.zeros(4 * batch, _INT),
        timer_s=np.zeros(4 * batch),
        notices=np.zeros((6 * batch, k.N_COLUMNS)),
        gaps_s=np.zeros(longest_output_tokens + 1),
    )
    state.counters[k.C_BLOCK_TOKENS] = block_tokens
    _chain(state.work, k.W_NEXT, 0, k.NONE)
    _chain(state.events, k.V_NEXT, 0, k.NONE)
    _chain(state.segments, 2, 0, k.NONE)
    _chain(state.residencies, k.R_NEXT, 0, k.NONE)
    topology = Topology(cluster.links)
    for number, instance in enumerate(cluster.instances):
        _set_engine(state, number, instance, topology)
    for number, pool in enumerate(cluster.pools):
        state.links[k.LINKS_PER_ENGINE * engines + number] = pool.speed.bytes_per_s
    return state


def _set_engine(state: Arrays, number: int, instance: InstanceSpec, topology: Topology) -> None:
    row, speeds, kind = state.engines[number], state.speeds[number], instance.instance_class
    for queue in (k.E_WAITING, k.E_WANTS_KV, k.E_ARRIVED, k.E_LOADED):
        row[queue] = row[queue + 1] = k.NONE
    row[k.E_HOST] = row[k.E_DISK] = k.NONE
    block_tokens = int(state.counters[k.C_BLOCK_TOKENS])
    row[k.E_KV_TOKENS] = instance.kv_tokens // block_tokens * block_tokens
    row[k.E_SEQUENCES] = instance.sequences
    row[k.E_CHUNK_TOKENS] = kind.chunk_tokens
    row[k.E_STAGES] = instance.pipeline
    row[k.E_STREAMS] = instance.streams_layers
    row[k.E_LOCATION : k.E_LOCATION + 4] = topology.location_ids(instance.location, instance.name)
    speeds[k.G_A] = kind.prefill_s_per_token
    speeds[k.G_B] = kind.prefill_s_per_token_squared
    speeds[k.G_BASE] = kind.prefill_base_s
    speeds[k.G_D] = kind.prefill_s_per_cached_token
    speeds[k.G_DECODE_BASE] = kind.decode_base_s
    speeds[k.G_PER_SEQUENCE] = kind.decode_s_per_sequence
    speeds[k.G_PER_CONTEXT] = kind.decode_s_per_context_token
    speeds[k.G_KV_BYTES] = kind.kv_bytes_per_token
    speeds[k.G_LAYERS] = kind.layers
    speeds[k.G_NIC_LATENCY_S] = kind.nic.latency_s
    links = k.LINKS_PER_ENGINE * number
    state.links[links] = state.links[links + 1] = kind.nic.bytes_per_s
    for source, tier in enumerate(_SOURCES):
        speed = kind.tiers.get(tier, _UNLIMITED)
        speeds[k.G_LOAD_BYTES_PER_S + source] = speed.bytes_per_s
        speeds[k.G_LOAD_LATENCY_S + source] = speed.latency_s
        if tier in (Tier.HOST, Tier.DISK):
            state.links[links + 2 + source] = speed.bytes_per_s


def _chain(rows: Ints, column: int, start: int, last: int) -> None:
    """Chain rows from ``start`` on as free ones, ``last`` behind them."""
    rows[start:, column] = np.arange(start + 1, len(rows) + 1)
    rows[-1, column] = last


def flat_hashes(chains: Sequence[Words]) -> tuple[Words, list[int]]:
    """Chains of hashes one behind the other, and where each begins."""
    starts = np.cumsum([0, *(len(chain) for chain in chains)])
    hashes = np.concatenate([np.empty(0, np.uint64), *chains])
    return hashes, starts[:-1].tolist()
