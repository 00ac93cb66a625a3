"""Residency of engines that publish no events: what was routed to them is assumed to be stored.

Assumptions live in the same index as reported residencies. An engine's cache is taken to evict the least
recently used blocks, of one request the deepest first, and nothing is believed longer than a time to live.
"""

from __future__ import annotations

from typing import Final

from cache_index.assumed_runs import AssumedRuns, LastUsed
from cache_index.hashing import Hashes, Namespace
from cache_index.kernels.assumed import EXPIRED
from cache_index.radix import CacheIndex
from cache_index.residency import Holder, Tier

DEFAULT_TTL_S = 120.0
DEFAULT_CAPACITY_BLOCKS = 16_384
_NEVER: Final = LastUsed()


class ApproximateResidency:
    """Keeps assumptions of the holders that were added; calls for any other holder do nothing.

    Not thread-safe. A call costs O(blocks that are new), eviction amortised; a holder never has more blocks in the
    index than its capacity.
    """

    def __init__(self, index: CacheIndex, *, ttl_s: float = DEFAULT_TTL_S) -> None:
        self._index = index
        self._ttl_s = ttl_s
        self._holders: dict[Holder, AssumedRuns] = {}
        self.predicted = self._holders.keys()  # whose residencies are assumptions
        self._calls = 0

    def blocks(self, holder: Holder) -> int:
        """How many blocks a holder is assumed to have."""
        assumed = self._holders.get(holder)
        return 0 if assumed is None else assumed.blocks

    def add(self, holder: Holder, capacity_blocks: int = DEFAULT_CAPACITY_BLOCKS) -> None:
        """Begin to assume for a holder, which is registered; known assumptions are kept."""
        if capacity_blocks <= 0:
            raise ValueError(f"capacity_blocks must be positive, not {capacity_blocks}")
        self._index.register(holder)
        assumed = self._holders.get(holder)
        if assumed is None:
            assumed = self._holders[holder] = AssumedRuns(capacity_blocks, self._ttl_s)
        assumed.capacity_blocks = capacity_blocks
        while (excess := assumed.blocks - capacity_blocks) > 0:
            self._lose_last(holder, assumed, excess)

    def remove(self, holder: Holder) -> None:
        """Stop assuming for a holder and forget what was assumed."""
        if self._holders.pop(holder, None) is not None:
            self._index.clear(holder, Tier.DEVICE)

    def forget(self, holder: Holder) -> None:
        """The engine lost its cache."""
        assumed = self._holders.get(holder)
        if assumed is not None:
            self._holders[holder] = AssumedRuns(assumed.capacity_blocks, self._ttl_s)
            self._index.clear(holder, Tier.DEVICE)

    def assume(self, holder: Holder, namespace: Namespace, hashes: Hashes, now_s: float) -> LastUsed:
        """A request with these blocks was sent to the holder.

        Returns for each of the leading blocks that had been assumed the number of the call, growing from one to
        the next, that routed it there last; ends at the first that had not. Of a chain longer than the capacity
        its beginning is kept.
        """
        assumed = self._holders.get(holder)
        if assumed is None or not len(hashes):
            return _NEVER
        self._calls = (number := self._calls) + 1
        while True:
            runs = self._index.assume(holder, assumed, namespace, hashes, number, now_s)
            if runs == 0:
                return _NEVER
            if runs > 0:
                return assumed.last_used(runs)
            if runs == EXPIRED:
                self._expire(holder, assumed, now_s)
            else:
                assumed.make_room(min(len(hashes), assumed.capacity_blocks))

    def evicted(self, holder: Holder, last_used: int) -> int:
        """The engine turned out to have evicted a block that the call to `assume` of this number used last.

        An LRU cache has then evicted everything that was not used since; returns how many blocks that was.
        """
        assumed = self._holders.get(holder)
        if assumed is None:
            return 0
        before = assumed.blocks
        while (oldest := assumed.oldest) is not None and oldest[0] <= last_used:
            self._lose_last(holder, assumed, assumed.blocks)
        return before - assumed.blocks

    def expire(self, now_s: float) -> None:
        """Drop what was not assumed again within the time to live, of all holders."""
        for holder, assumed in self._holders.items():
            self._expire(holder, assumed, now_s)

    def _expire(self, holder: Holder, assumed: AssumedRuns, now_s: float) -> None:
        while (oldest := assumed.oldest) is not None and oldest[1] + self._ttl_s <= now_s:
            self._lose_last(holder, assumed, assumed.blocks)

    def _lose_last(self, holder: Holder, assumed: AssumedRuns, blocks: int) -> None:
        self._index.remove_keys(holder, Tier.DEVICE, assumed.lose_last(blocks))
