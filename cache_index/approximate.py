"""Residency of engines that publish no events: what was routed to them is assumed to be stored.

Assumptions live in the same index as reported residencies. An engine's cache is taken to evict the least
recently used blocks, of one request the deepest first, and nothing is believed longer than a time to live.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cache_index.hashing import Hashes, Namespace
from cache_index.named_blocks import store_missing
from cache_index.radix import CacheIndex
from cache_index.residency import Holder, Tier
from cache_index.run_table import Numbers, RunTable

DEFAULT_TTL_S = 120.0
DEFAULT_CAPACITY_BLOCKS = 16_384
_NEVER: Numbers = np.empty(0, np.int64)


@dataclass(slots=True)
class _Run:
    """What is left of one assumption: those blocks of its chain that no later run has, from the ``first`` on.

    A later run takes over what the two chains have in common, which is the beginning of both; what is evicted goes
    from the end. So nothing is ever missing in the middle.
    """

    at_s: float
    namespace: Namespace
    first: int
    hashes: Hashes


class _Assumed:
    """What one holder is assumed to have: blocks by key, each with the number of the run it was last in."""

    def __init__(self, capacity_blocks: int) -> None:
        self.capacity_blocks = capacity_blocks
        self.run_of = RunTable()
        self.runs: dict[int, _Run] = {}  # by number, the oldest first

    def take_over(self, numbers: Numbers) -> None:
        """The leading blocks of a chain, which these runs had last, have another run now."""
        first = 0
        while first < len(numbers):
            number = numbers.item(first)
            first += int(np.count_nonzero(numbers[first:] == number))  # those of one run stand together
            run = self.runs.get(number)
            if run is None:  # hashes of two prompts collide
                continue
            taken = first - run.first
            if taken < len(run.hashes):
                run.first, run.hashes = first, run.hashes[taken:].copy()  # a view would keep the whole array
            else:
                del self.runs[number]


class ApproximateResidency:
    """Keeps assumptions of the holders that were added; calls for any other holder do nothing.

    Not thread-safe. A call costs O(blocks given), eviction amortised; a holder never has more blocks in the
    index than its capacity.
    """

    def __init__(self, index: CacheIndex, *, ttl_s: float = DEFAULT_TTL_S) -> None:
        self._index = index
        self._ttl_s = ttl_s
        self._holders: dict[Holder, _Assumed] = {}
        self._runs = 0

    @property
    def predicted(self) -> frozenset[Holder]:
        """The holders whose residencies are assumptions."""
        return frozenset(self._holders)

    def is_predicted(self, holder: Holder) -> bool:
        return holder in self._holders

    def blocks(self, holder: Holder) -> int:
        """How many blocks a holder is assumed to have."""
        assumed = self._holders.get(holder)
        return 0 if assumed is None else len(assumed.run_of)

    def add(self, holder: Holder, capacity_blocks: int = DEFAULT_CAPACITY_BLOCKS) -> None:
        """Begin to assume for a holder, which is registered; known assumptions are kept."""
        if capacity_blocks <= 0:
            raise ValueError(f"capacity_blocks must be positive, not {capacity_blocks}")
        self._index.register(holder)
        assumed = self._holders.setdefault(holder, _Assumed(capacity_blocks))
        assumed.capacity_blocks = capacity_blocks
        self._evict(holder, assumed, len(assumed.run_of) - capacity_blocks)

    def remove(self, holder: Holder) -> None:
        """Stop assuming for a holder and forget what was assumed."""
        if self._holders.pop(holder, None) is not None:
            self._index.clear(holder, Tier.DEVICE)

    def forget(self, holder: Holder) -> None:
        """The engine lost its cache."""
        assumed = self._holders.get(holder)
        if assumed is not None:
            self._holders[holder] = _Assumed(assumed.capacity_blocks)
            self._index.clear(holder, Tier.DEVICE)

    def assume(self, holder: Holder, namespace: Namespace, hashes: Hashes, now_s: float) -> Numbers:
        """A request with these blocks was sent to the holder.

        Returns for each of the leading blocks that had been assumed the number of the call, growing from one to
        the next, that routed it there last; ends at the first that had not. Of a chain longer than the capacity
        its beginning is kept.
        """
        assumed = self._holders.get(holder)
        if assumed is None:
            return _NEVER
        self._expire(holder, assumed, now_s)
        hashes = np.ascontiguousarray(hashes[: assumed.capacity_blocks], np.uint64)
        blocks = len(hashes)
        if not blocks:
            return _NEVER
        number = self._runs
        self._runs += 1
        before, new, leading = assumed.run_of.put(hashes ^ namespace.domain_word, number)
        last_used = before[:leading]
        assumed.take_over(last_used)
        assumed.runs[number] = _Run(now_s, namespace, 0, hashes)
        self._evict(holder, assumed, len(assumed.run_of) - assumed.capacity_blocks)
        if leading + new < blocks:
            store_missing(self._index, holder, Tier.DEVICE, namespace, hashes, before < 0)
        elif new:
            parent = hashes.item(leading - 1) if leading else 0
            self._index.store(holder, Tier.DEVICE, namespace, hashes[leading:], parent=parent)
        return last_used

    def evicted(self, holder: Holder, last_used: int) -> int:
        """The engine turned out to have evicted a block that the call to `assume` of this number used last.

        An LRU cache has then evicted everything that was not used since; returns how many blocks that was.
        """
        assumed = self._holders.get(holder)
        before = 0 if assumed is None else len(assumed.run_of)
        while assumed is not None and assumed.runs and next(iter(assumed.runs)) <= last_used:
            self._evict_from_oldest(holder, assumed, len(assumed.run_of))
        return 0 if assumed is None else before - len(assumed.run_of)

    def expire(self, now_s: float) -> None:
        """Drop what was not assumed again within the time to live, of all holders."""
        for holder, assumed in self._holders.items():
            self._expire(holder, assumed, now_s)

    def _expire(self, holder: Holder, assumed: _Assumed, now_s: float) -> None:
        runs = assumed.runs
        while runs and runs[next(iter(runs))].at_s + self._ttl_s <= now_s:
            self._evict_from_oldest(holder, assumed, len(assumed.run_of))

    def _evict(self, holder: Holder, assumed: _Assumed, blocks: int) -> None:
        while blocks > 0:
            blocks -= self._evict_from_oldest(holder, assumed, blocks)

    def _evict_from_oldest(self, holder: Holder, assumed: _Assumed, blocks: int) -> int:
        """Drop at most so many blocks of the oldest run; drop the run when none is left."""
        number, run = next(iter(assumed.runs.items()))
        keys = run.hashes ^ run.namespace.domain_word
        evicted, stop = assumed.run_of.take_last(keys, len(keys), number, blocks)
        if len(evicted):
            self._index.remove(holder, Tier.DEVICE, run.namespace, run.hashes[evicted])
        run.hashes = run.hashes[:stop]
        if not stop:
            del assumed.runs[number]
        return len(evicted)
