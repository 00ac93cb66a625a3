"""All engines of a simulated cluster: the compiled model's arrays, made and enlarged as it needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from cache_index import Changes, Tier
from cache_index.kernel_set import entry_point
from conductor.costs import POOL_TIERS
from simulator.cluster.copies import OWN_LINKS, SOURCES, route
from simulator.cluster.engine_state import chain, make_state, stores_of
from simulator.cluster.kernels import (
    advance,
    compile_all,
    copy,
    discard,
    drain,
    drop,
    hand_on,
    kill,
    pin,
    read_gauges,
    submit,
    unpin,
)
from simulator.cluster.kernels import layout as k
from simulator.cluster.kernels.arrays import Floats, Ints, Words, addresses
from simulator.cluster.kernels.copies import NO_ROOM
from simulator.cluster.results import TierTraffic
from simulator.cluster.specification import ClusterSpec

_INT = np.int64
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
    "copies": (k.P_NEXT, k.C_FREE_COPY),
    "segments": (2, k.C_FREE_SEGMENT),
}


class Load(msgspec.Struct, frozen=True, gc=False):
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
        self._advance, self._submit = entry_point(advance), entry_point(submit)
        self._drain, self._read_gauges = entry_point(drain), entry_point(read_gauges)
        self.stores = tuple(stores_of(cluster))
        self._state = make_state(cluster, self.stores, hashes, block_tokens, longest_output_tokens)
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
            work: int = self._submit(
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

    def copy(
        self, number: int, source: int, target: int, load: Load, start: int, stop: int, now_s: float
    ) -> int:
        """Begin to copy blocks of a request's prompt from store to store; a notice tells the end by ``number``.

        Returns how many are to move: fewer than asked for where the target has some, 0 when it has all, -1 when
        the source has not even the first; then nothing is begun. Raises ValueError for stores without a link.
        """
        way = route(self._state, self.stores[source], self.stores[target])
        while True:
            moved: int = copy(
                self._address, number, source, target, load.first_hash, start, stop, way.links, way.coder,
                way.cap_bytes_per_s, way.latency_s, way.bytes_per_token, now_s,
            )  # fmt: skip
            if moved != NO_ROOM:
                return moved
            self._enlarge("copies", "flows", "flow_s")

    def discard(self, store: int, load: Load, start: int, stop: int) -> int:
        """Drop blocks of a request's prompt that nobody refers to; how many there were."""
        while True:
            dropped: int = discard(self._address, store, load.first_hash, start, stop)
            if dropped != NO_ROOM:
                return dropped
            self._enlarge("events")

    def pin(self, store: int, load: Load, start: int, stop: int) -> int:
        """Keep blocks of a host, a disk or a pool until they are unpinned; how many of the range are."""
        return int(pin(self._address, store, load.first_hash, start, stop))

    def unpin(self, store: int, load: Load, start: int, stop: int) -> int:
        """How many blocks were pinned; they may go again."""
        return int(unpin(self._address, store, load.first_hash, start, stop))

    def advance(
        self, now_s: float, until_s: float, *, patient: bool = False
    ) -> tuple[float, list[list[float]]]:
        """Let time go on until something is to be told, or ``until_s``: when that is, and the notices.

        For whoever is ``patient``, first tokens and ends of answers can wait until then: they say when they were.
        """
        counters = self._state.counters
        while True:
            now_s = self._advance(self._address, now_s, until_s, patient)
            short = counters.item(k.C_SHORT)
            if short == k.ENOUGH:
                break
            self._enlarge(*_ENLARGED[short])
        notices = counters.item(k.C_NOTICES)
        return now_s, self._state.notices[:notices].tolist() if notices else []

    def changes(self) -> Changes | None:
        """What stores got and lost since the last call, in order for each of them; None for nothing.

        Valid until the next call.
        """
        if not self._state.counters.item(k.C_EVENTS):
            return None
        if len(self._changes) < len(self._state.events):
            self._changes = np.empty((len(self._state.events), 5), _INT)
            self._removed = np.empty(len(self._state.events), np.uint64)
        rows = self._drain(self._address, self._changes, self._removed)
        return Changes(self._changes[:rows], self._state.hashes, self._removed)

    def gauges(self, now_s: float) -> Gauges:
        """What engines would say of themselves now."""
        running, waiting, used_tokens = self.read_gauges(now_s).T
        usage = used_tokens / self.kv_tokens
        return Gauges(running.astype(np.int32), waiting.astype(np.int32), usage)

    def read_gauges(self, now_s: float) -> Floats:
        """The same as [engine, (running, waiting, tokens taken)]."""
        table = np.empty((len(self._state.engines), 3))
        self._read_gauges(self._address, now_s, table)
        return table

    @property
    def kv_tokens(self) -> Ints:
        """Of each engine's device."""
        tokens: Ints = self._state.engines[:, k.E_KV_TOKENS]
        return tokens

    @property
    def cached_tokens(self) -> Ints:
        """Of each store: tokens in blocks that can be found, in use or not."""
        state = self._state
        blocks = state.stores[:, k.S_IDLE] + state.stores[:, k.S_PINNED]
        blocks[state.engines[:, k.E_DEVICE]] += state.engines[:, k.E_REFERRED]
        tokens: Ints = blocks * state.counters[k.C_BLOCK_TOKENS]
        return tokens

    def tier_traffic(self) -> dict[str, TierTraffic]:
        """By tier, in all; flows under way count as a whole."""
        state, traffic = self._state, dict[str, TierTraffic]()
        written = state.stores[:, k.S_WRITTEN] * state.counters[k.C_BLOCK_TOKENS]
        for store, tokens in zip(self.stores, written.tolist(), strict=True):
            if store.tier is Tier.DEVICE:
                continue
            if store.tier in POOL_TIERS:
                (members,) = state.pools[:, store.owner].nonzero()
                engine, link = (members[0] if len(members) else 0), len(state.engines) * k.LINKS_PER_ENGINE
                link += store.owner
            else:
                engine, link = store.owner, store.owner * k.LINKS_PER_ENGINE + OWN_LINKS[store.tier]
            size = state.speeds.item(engine, k.G_STORED_BYTES + SOURCES[store.tier])
            before = traffic.get(store.tier.name.lower(), TierTraffic(0.0, 0.0))
            traffic[store.tier.name.lower()] = TierTraffic(
                before.carried_bytes + state.link_bytes.item(link), before.written_bytes + tokens * size
            )
        return traffic

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
        slower = np.array([store.tier is not Tier.DEVICE for store in self.stores])
        pinned = np.bincount(kept[kept[:, k.R_REFERENCES] > 0, k.R_STORE], minlength=len(state.stores))
        assert (pinned[slower] == state.stores[slower, k.S_PINNED]).all(), "pinned blocks are miscounted"
        held = idle + state.stores[:, k.S_PINNED]
        assert (held <= state.stores[:, k.S_CAPACITY]).all(), "a store is over its capacity"
        assert (state.table != k.NONE).sum() == len(kept), "the table of blocks has lost some"
        flows = int(state.counters[k.C_FLOWS])
        users, moved = np.zeros(len(state.links), _INT), np.zeros(len(state.links))
        for flow, seconds in zip(state.flows[:flows], state.flow_s[:flows], strict=True):
            for link in (flow[k.L_GIVER], flow[k.L_TAKER], flow[k.L_CODER]):
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
                chain(new, column, len(old), int(self._state.counters[counter]))
                self._state.counters[counter] = len(old)
                if name == "work":
                    new[len(old) :, k.W_ENGINE] = k.NONE
        self._state = self._state._replace(**larger)
        self._table = addresses(self._state)
        self._address = self._table.ctypes.data


def flat_hashes(chains: Sequence[Words]) -> tuple[Words, list[int]]:
    """Chains of hashes one behind the other, and where each begins."""
    starts = np.cumsum([0, *(len(chain) for chain in chains)])
    hashes = np.concatenate([np.empty(0, np.uint64), *chains])
    return hashes, starts[:-1].tolist()
