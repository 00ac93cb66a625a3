"""KV memory of a simulated engine, by blocks of the trace: what requests refer to, and what is cached besides.

Room for prompt and answer is taken when a request begins, so nothing is ever preempted. A block that two requests
compute at once is kept once. Blocks that nobody refers to are evicted, least recently used first, the ends of
chains before their beginnings (as vLLM frees them).
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from cache_index import CacheIndex, Holder, Namespace, Tier

Hashes = NDArray[np.uint64]


class CacheListener(Protocol):
    """Whoever is told what a memory caches, as an engine's KV events would."""

    def stored(self, hashes: Hashes, parent: int) -> None:
        """Consecutive blocks of one chain; ``parent`` is the hash before them, 0 for none."""
        ...

    def removed(self, hashes: list[int]) -> None:
        """These blocks are gone."""
        ...


class IndexListener:
    """Tells a cache index at once, without the delay of an event stream."""

    def __init__(self, index: CacheIndex, holder: Holder, namespace: Namespace) -> None:
        self._index = index
        self._holder = holder
        self._namespace = namespace

    def stored(self, hashes: Hashes, parent: int) -> None:
        self._index.store(self._holder, Tier.DEVICE, self._namespace, hashes, parent=parent)

    def removed(self, hashes: list[int]) -> None:
        self._index.remove(self._holder, Tier.DEVICE, self._namespace, np.array(hashes, np.uint64))


class KvMemory:
    """``capacity_tokens`` tokens in blocks of ``block_tokens``. Every operation is constant time per block.

    Chains are given twice where they are stored: as integers (``keys``) and as the array they come from.
    """

    def __init__(self, capacity_tokens: int, block_tokens: int, listener: CacheListener) -> None:
        if capacity_tokens < block_tokens:
            raise ValueError(
                f"a capacity of {capacity_tokens} tokens does not hold a block of {block_tokens}"
            )
        self.capacity_tokens = capacity_tokens
        self.block_tokens = block_tokens
        self._listener = listener
        self._references: dict[int, int] = {}  # of blocks that requests refer to
        self._idle: OrderedDict[int, None] = OrderedDict()  # cached, evictable, least recently used first
        self._loose_tokens = 0  # taken, and no block of a chain (yet)

    @property
    def used_tokens(self) -> int:
        """Taken by requests; what is merely cached does not count."""
        return len(self._references) * self.block_tokens + self._loose_tokens

    @property
    def usage(self) -> float:
        return self.used_tokens / self.capacity_tokens

    @property
    def cached_blocks(self) -> int:
        """Blocks that can be found, in use or not."""
        return len(self._references) + len(self._idle)

    def matched_blocks(self, keys: list[int], limit: int) -> int:
        """Length of the longest cached prefix of a chain, at most ``limit`` blocks."""
        references, idle = self._references, self._idle
        for position in range(min(limit, len(keys))):
            key = keys[position]
            if key not in references and key not in idle:
                return position
        return min(limit, len(keys))

    def take(self, keys: list[int], matched: int, tokens: int) -> bool:
        """Room for ``tokens`` tokens that begin with ``matched`` cached blocks; False, and no effect, if full."""
        references, idle = self._references, self._idle
        found = sum(key not in references for key in keys[:matched])
        loose = tokens - matched * self.block_tokens
        if self.used_tokens + found * self.block_tokens + loose > self.capacity_tokens:
            return False
        for key in keys[:matched]:
            if key in references:
                references[key] += 1
            else:
                del idle[key]
                references[key] = 1
        self._loose_tokens += loose
        self._evict()
        return True

    def commit(self, keys: list[int], hashes: Hashes, start: int, stop: int) -> None:
        """Blocks ``start`` to ``stop`` of a chain are computed, in room that was taken before."""
        references, idle = self._references, self._idle
        self._loose_tokens -= (stop - start) * self.block_tokens
        run = start  # beginning of the new blocks that were not told yet
        for position in range(start, stop):
            key = keys[position]
            if key in references:
                references[key] += 1
            elif key in idle:
                del idle[key]
                references[key] = 1
            else:
                references[key] = 1
                continue
            self._tell(keys, hashes, run, position)
            run = position + 1
        self._tell(keys, hashes, run, stop)

    def release(self, keys: list[int], committed: int, loose_tokens: int) -> None:
        """Give up what a request took: its first ``committed`` blocks stay cached, the rest is free."""
        references, idle = self._references, self._idle
        for position in range(committed - 1, -1, -1):
            key = keys[position]
            left = references[key] - 1
            if left:
                references[key] = left
            else:
                del references[key]
                idle[key] = None
        self._loose_tokens -= loose_tokens

    def check_invariants(self) -> None:
        """Assert that nothing is counted twice and the capacity is kept; for tests."""
        assert not self._references.keys() & self._idle.keys(), "a block is idle and in use"
        assert self._loose_tokens >= 0, "more was given up than taken"
        assert all(count > 0 for count in self._references.values())
        assert self.cached_blocks * self.block_tokens + self._loose_tokens <= self.capacity_tokens

    def _tell(self, keys: list[int], hashes: Hashes, start: int, stop: int) -> None:
        if stop > start:
            self._listener.stored(hashes[start:stop], keys[start - 1] if start else 0)

    def _evict(self) -> None:
        idle = self._idle
        room = (self.capacity_tokens - self.used_tokens) // self.block_tokens
        if len(idle) > room:
            self._listener.removed([idle.popitem(last=False)[0] for _ in range(len(idle) - room)])
