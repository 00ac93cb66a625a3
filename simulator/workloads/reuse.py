"""What a cache of so many blocks can reuse of a trace: without limit, with LRU, and at best (Belady).

One cache for the whole trace, filled without delay. By capacity, blocks are looked up and stored one by one, in
the order of the prompts. An engine, which counts prefixes and frees a prompt's tail first, has LRU hit rates
within 0.002 of these on Mooncake's published traces.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile

from simulator.workloads.records import TraceRecord

_NEVER = 1 << 62


@dataclass(frozen=True, slots=True)
class UnlimitedReuse:
    """What a cache that never evicts would find."""

    block_accesses: int
    unique_blocks: int
    blocks_used_once: int
    block_hits: int
    input_tokens: int
    token_hits: int  # of prefixes
    requests_with_hits: int
    requests: int

    @property
    def block_hit_rate(self) -> float:
        return self.block_hits / self.block_accesses if self.block_accesses else 0.0

    @property
    def token_hit_rate(self) -> float:
        return self.token_hits / self.input_tokens if self.input_tokens else 0.0


def unlimited_reuse(records: Iterable[TraceRecord]) -> UnlimitedReuse:
    """Hits of the longest prefix seen before, in blocks and in tokens."""
    uses: dict[int, int] = {}
    accesses = hits = input_tokens = token_hits = with_hits = requests = 0
    for record in records:
        found = sum(1 for _ in takewhile(uses.__contains__, record.hash_ids))
        for block in record.hash_ids:
            uses[block] = uses.get(block, 0) + 1
        requests += 1
        accesses += len(record.hash_ids)
        hits += found
        with_hits += found > 0
        input_tokens += record.input_tokens
        token_hits += min(found * record.block_tokens, record.input_tokens)
    once = sum(count == 1 for count in uses.values())
    return UnlimitedReuse(*(accesses, len(uses), once, hits, input_tokens, token_hits, with_hits, requests))


def block_accesses(records: Iterable[TraceRecord]) -> list[int]:
    """The trace as a sequence of block accesses."""
    return [block for record in records for block in record.hash_ids]


def lru_hits(accesses: Sequence[int], capacity_blocks: int) -> int:
    """Hits of a cache that evicts the block used longest ago. O(accesses)."""
    _check(capacity_blocks)
    cache: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for block in accesses:
        if block in cache:
            hits += 1
            cache.move_to_end(block)
            continue
        cache[block] = None
        if len(cache) > capacity_blocks:
            cache.popitem(last=False)
    return hits


def next_uses(accesses: Sequence[int]) -> list[int]:
    """For each access the index of the next access to the same block, past any index when there is none."""
    last: dict[int, int] = {}
    following = [_NEVER] * len(accesses)
    for index in range(len(accesses) - 1, -1, -1):
        following[index] = last.get(accesses[index], _NEVER)
        last[accesses[index]] = index
    return following


def belady_hits(accesses: Sequence[int], capacity_blocks: int, following: Sequence[int]) -> int:
    """The most hits any policy can have: evict what is used again last, do not store what is used later still.

    MIN of Belady (1966) with bypass. ``following`` is `next_uses` of ``accesses``. O(accesses log accesses).
    """
    _check(capacity_blocks)
    stored: set[int] = set()
    latest: list[tuple[int, int]] = []  # (-next use, block); entries of blocks used since are outdated
    next_of: dict[int, int] = {}
    hits = 0
    for index, block in enumerate(accesses):
        following_use = following[index]
        if block in stored:
            hits += 1
            if following_use == _NEVER:
                stored.discard(block)
                continue
        elif following_use == _NEVER:
            continue
        stored.add(block)
        next_of[block] = following_use
        heapq.heappush(latest, (-following_use, block))
        while len(stored) > capacity_blocks:
            use, candidate = heapq.heappop(latest)
            if candidate in stored and next_of[candidate] == -use:
                stored.discard(candidate)
    return hits


def _check(capacity_blocks: int) -> None:
    if capacity_blocks < 1:
        raise ValueError(f"capacity_blocks must be at least 1, not {capacity_blocks}")
