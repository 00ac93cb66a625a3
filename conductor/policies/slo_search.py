"""What `slo` does for a request in one compiled call: estimates over a roster, the choice, and what is told of it.

A call with a dozen arrays takes longer than what it computes over a few ranks, so the kernel gets one address: that
of the `Grounds`, which have those of the roster's arrays and of the cluster's tables.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
from numba import types
from numba.np.numpy_support import carray
from numpy.typing import NDArray

from cache_index.kernel_cache import cache_directory, cached_njit
from cache_index.kernel_set import compiled
from conductor.costs import Floats, Ints, addresses, topology
from conductor.costs import held as h
from conductor.costs import kernels as k
from conductor.costs import tables as t
from conductor.costs.addresses import floats_at, integers_at, tokens_at
from conductor.policies import slo_kernel
from conductor.roster import Roster

_SOURCES: Final = (h, k, slo_kernel, t, topology, addresses)
_DIRECTORY = cache_directory(Path(__file__), *(Path(str(each.__file__)) for each in _SOURCES))

Levels = NDArray[np.int32]
NO_LEVELS: Final[Levels] = np.empty((0, k.TIERS), np.int32)

# ---- the words of the grounds ----
(
    _SIZE,
    _ROWS,
    _ROLES,
    _PROTOCOL,
    _LIMIT_TOKENS,
    _LOCATIONS,
    _LINK_LATENCY_S,
    _KV_BYTES,
    _GROUP_OF,
    _ANY_FETCHES,
    _JOINT_PROTOCOLS,
    _BLOCK_SIZE,
    _MEMBERS,
    _MEMBER_COUNT,
    _HOLDER_IDS,
    _TABLE_ROWS,
    _LOADS,
    _RANKS,
    _CLASSES,
    _CLASS_ROWS,
    _POOLS,
    _POOL_ROWS,
    _LINKS,
    _LINK_ROWS,
    _WORDS,
) = range(25)


# Prefill, decode, peer, group of the prefill rank; the plan's tokens, of these local, what is held on the prefill
# rank's device and on the decode rank's; prefill factor, fetch, prefill, queue, hand-off, wait and decode step;
# whether steps that carry the prefill are long, and whether a decode rank prefills. The first is -1 where there is
# no choice.
Found: TypeAlias = tuple[
    int, int, int, int, int, int, int, int, float, float, float, float, float, float, float, bool, bool
]


NOTHING_FOUND: Final[Found] = (-1, -1, -1, -1, 0, 0, 0, 0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, False, False)


class Grounds:
    """Where a roster of at most one cache group and the tables stand in memory.

    Tables that have grown stand elsewhere: good while its ``loads`` and ``classes`` are theirs.
    """

    def __init__(self, roster: Roster) -> None:
        tables = roster.tables
        group = roster.cache_groups[0] if roster.cache_groups else None
        self.roster, self._links = roster, tables.links  # all of them are kept as long as this is
        self.loads, self._ranks = tables.loads, tables.ranks
        self.classes, self._pools = tables.classes, tables.pools
        words = self._words = np.zeros(_WORDS, np.int64)
        arrays = {
            _ROWS: roster.rows,
            _ROLES: roster.roles,
            _PROTOCOL: roster.protocol,
            _LIMIT_TOKENS: roster.limit_tokens,
            _LOCATIONS: roster.locations,
            _LINK_LATENCY_S: roster.link_latency_s,
            _KV_BYTES: roster.kv_bytes_per_token,
            _GROUP_OF: roster.group_of,
            _LOADS: self.loads,
            _RANKS: self._ranks,
            _CLASSES: self.classes,
            _POOLS: self._pools,
            _LINKS: self._links,
        }
        if group is not None:
            arrays |= {_MEMBERS: group.members, _HOLDER_IDS: group.holder_ids}
            words[_BLOCK_SIZE], words[_MEMBER_COUNT] = group.namespace.block_size, len(group.members)
        for word, array in arrays.items():
            assert array.flags.c_contiguous and array.itemsize == 8
            words[word] = array.ctypes.data
        words[_SIZE] = len(roster.ranks)
        words[_ANY_FETCHES], words[_JOINT_PROTOCOLS] = roster.any_fetches, roster.joint_protocols
        words[_TABLE_ROWS], words[_CLASS_ROWS] = len(self.loads), len(self.classes)
        words[_POOL_ROWS], words[_LINK_ROWS] = len(self._pools), len(self._links)
        self.address = int(words.ctypes.data)


def block_words(ranks: int) -> int:
    """Of a block: `costs.kernels`' seconds, then the plans, then what is held."""
    return (k.SECONDS_ROWS + k.PLAN_ROWS) * ranks + (k.TIERS * ranks + 1) // 2


def views_of(block: Floats, ranks: int) -> tuple[Floats, Ints, NDArray[np.int32]]:
    """Seconds [term, rank], plans [row, rank] and held tokens [rank, tier] of a block."""
    plans = k.SECONDS_ROWS * ranks
    held = plans + k.PLAN_ROWS * ranks
    return (
        block[:plans].reshape(k.SECONDS_ROWS, ranks),
        block[plans:held].view(np.int64).reshape(k.PLAN_ROWS, ranks),
        block[held:].view(np.int32)[: k.TIERS * ranks].reshape(ranks, k.TIERS),
    )


def search(
    address: int,
    levels: Levels,
    now_s: float,
    prompt_tokens: int,
    output_tokens: int,
    ttft_objective_s: float,
    tbt_objective_s: float,
    decode_prefill_tokens: int,
    block: Floats,
) -> Any:
    """Fill ``block``, choose as `slo_kernel.choose` does, and return what was `Found`.

    ``levels`` are what the index matched, by its holders; empty where nothing is known.
    """
    g = integers_at(address)
    size, table_rows = g[_SIZE], g[_TABLE_ROWS]
    base = block.ctypes.data
    seconds = carray(floats_at(base), (k.SECONDS_ROWS, size))
    plans = carray(integers_at(base + 8 * k.SECONDS_ROWS * size), (k.PLAN_ROWS, size))
    held = carray(tokens_at(base + 8 * (k.SECONDS_ROWS + k.PLAN_ROWS) * size), (size, k.TIERS))
    rows = carray(integers_at(g[_ROWS]), (size,))
    loads = carray(floats_at(g[_LOADS]), (table_rows, t.LOAD_COLUMNS))
    ranks = carray(integers_at(g[_RANKS]), (table_rows, t.RANK_COLUMNS))
    classes = carray(floats_at(g[_CLASSES]), (g[_CLASS_ROWS], t.CLASS_COLUMNS))
    pools = carray(floats_at(g[_POOLS]), (g[_POOL_ROWS], t.POOL_COLUMNS))
    links = carray(floats_at(g[_LINKS]), (g[_LINK_ROWS], 2))
    held[:] = 0
    if levels.shape[0] > 0:
        members = g[_MEMBER_COUNT]
        block_size = g[_BLOCK_SIZE]
        # A fully cached prompt still recomputes its last block.
        h.write_held(
            levels,
            carray(integers_at(g[_HOLDER_IDS]), (members,)),
            carray(integers_at(g[_MEMBERS]), (members,)),
            block_size,
            (prompt_tokens - 1) // block_size * block_size,
            held,
        )
    k.estimate(
        rows,
        loads,
        ranks,
        classes,
        links,
        pools,
        held,
        now_s,
        prompt_tokens,
        output_tokens,
        tbt_objective_s,
        g[_ANY_FETCHES] != 0,
        seconds,
        plans,
    )
    locations = carray(integers_at(g[_LOCATIONS]), (topology.LOCATION_LEVELS, size))
    link_latency_s = carray(floats_at(g[_LINK_LATENCY_S]), (size,))
    kv_bytes = carray(floats_at(g[_KV_BYTES]), (size,))
    roles = carray(integers_at(g[_ROLES]), (size,))
    p, d, peer = slo_kernel.choose(
        roles,
        carray(integers_at(g[_PROTOCOL]), (size,)),
        carray(integers_at(g[_LIMIT_TOKENS]), (size,)),
        prompt_tokens,
        held.T,
        plans,
        seconds,
        locations,
        link_latency_s,
        kv_bytes,
        links,
        ttft_objective_s,
        tbt_objective_s,
        decode_prefill_tokens,
        g[_JOINT_PROTOCOLS],
    )
    if p < 0:
        return NOTHING_FOUND
    hand_off_s = 0.0
    if p != d:
        hand_off_s = slo_kernel.hand_off_s(
            prompt_tokens,
            held.T,
            seconds[k.KV_S_PER_TOKEN],
            locations,
            link_latency_s,
            kv_bytes,
            links,
            p,
            d,
        )
    return (
        p,
        d,
        peer,
        carray(integers_at(g[_GROUP_OF]), (size,))[p],
        plans[k.PLAN_TOKENS, p],
        plans[k.PLAN_LOCAL, p],
        np.int64(held[p, 0]),
        np.int64(held[d, 0]),
        classes[ranks[rows[p], t.CLASS], t.PREFILL_SCALE],
        seconds[k.FETCH_S, p],
        seconds[k.PREFILL_S, p],
        seconds[k.QUEUE_S, p],
        hand_off_s,
        seconds[k.WAIT_S, d],
        seconds[k.TBT_S, d],
        seconds[k.STEP_S, p] > k.LONG * tbt_objective_s,
        p == d and roles[p] == t.DECODE,
    )


search = cached_njit(search, _DIRECTORY, nogil=False)
_INT, _S = types.int64, types.float64
_SIGNATURE: Final = (_INT, types.int32[:, ::1], _S, _INT, _INT, _S, _S, _INT, types.float64[::1])


def search_kernel() -> Callable[..., Found]:
    """`search`, compiled."""
    return compiled(search, *_SIGNATURE)
