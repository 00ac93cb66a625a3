"""Residency of engines that publish no events: what was routed to them is assumed to be stored.

Assumptions live in the same index as reported residencies. An engine's cache is taken to evict the least
recently used blocks, of one request the deepest first, and nothing is believed longer than a time to live.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from cache_index.hashing import Hashes, Namespace
from cache_index.named_blocks import store_missing
from cache_index.radix import CacheIndex
from cache_index.residency import Holder, Tier
from cache_index.run_table import Keys, Numbers, RunTable

DEFAULT_TTL_S = 120.0
DEFAULT_CAPACITY_BLOCKS = 16_384
_NEVER: Numbers = np.empty(0, np.int64)
COMPACT_FACTOR = 4  # entries per block of capacity above which superseded ones are dropped


@dataclass(slots=True)
class _Run:
    """The blocks of one assumption; those from ``stop`` on are gone, others may belong to a later run."""

    number: int  # of one holder's runs, in the order they were made
    at_s: float
    namespace: Namespace
    hashes: Hashes
    keys: Keys
    stop: int


class _Assumed:
    """What one holder is assumed to have: blocks by key, each with the number of the run it was last in."""

    def __init__(self, capacity_blocks: int) -> None:
        self.capacity_blocks = capacity_blocks
        self.run_of = RunTable()
        self.runs: deque[_Run] = deque()
        self.entries = 0  # of all runs

    def superseded(self, run: _Run) -> bool:
        """Whether a later run has the run's deepest block, and with it all before."""
        number = int(self.run_of.get(run.keys[run.stop - 1 : run.stop])[0])
        return number not in (-1, run.number)


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
        keys = hashes ^ namespace.domain_word
        number = self._runs
        self._runs += 1
        before, new, leading = assumed.run_of.put(keys, number)
        assumed.runs.append(_Run(number, now_s, namespace, hashes, keys, blocks))
        assumed.entries += blocks
        self._evict(holder, assumed, len(assumed.run_of) - assumed.capacity_blocks)
        if leading + new < blocks:
            store_missing(self._index, holder, Tier.DEVICE, namespace, hashes, before < 0)
        elif new:
            parent = hashes.item(leading - 1) if leading else 0
            self._index.store(holder, Tier.DEVICE, namespace, hashes[leading:], parent=parent)
        _compact(assumed)
        return before[:leading]

    def evicted(self, holder: Holder, last_used: int) -> int:
        """The engine turned out to have evicted a block that the call to `assume` of this number used last.

        An LRU cache has then evicted everything that was not used since; returns how many blocks that was.
        """
        assumed = self._holders.get(holder)
        before = 0 if assumed is None else len(assumed.run_of)
        while assumed is not None and assumed.runs and assumed.runs[0].number <= last_used:
            self._evict_from_oldest(holder, assumed, len(assumed.run_of) + 1)
        return 0 if assumed is None else before - len(assumed.run_of)

    def expire(self, now_s: float) -> None:
        """Drop what was not assumed again within the time to live, of all holders."""
        for holder, assumed in self._holders.items():
            self._expire(holder, assumed, now_s)

    def _expire(self, holder: Holder, assumed: _Assumed, now_s: float) -> None:
        while assumed.runs and assumed.runs[0].at_s + self._ttl_s <= now_s:
            self._evict_from_oldest(holder, assumed, len(assumed.run_of) + 1)

    def _evict(self, holder: Holder, assumed: _Assumed, blocks: int) -> None:
        while blocks > 0:
            blocks -= self._evict_from_oldest(holder, assumed, blocks)

    def _evict_from_oldest(self, holder: Holder, assumed: _Assumed, blocks: int) -> int:
        """Drop at most so many blocks of the oldest run; drop the run when none is left."""
        run, run_of = assumed.runs[0], assumed.run_of
        if assumed.superseded(run):
            assumed.runs.popleft()
            assumed.entries -= run.stop
            return 0
        evicted, stop = run_of.take_last(run.keys, run.stop, run.number, blocks)
        assumed.entries -= run.stop - stop
        run.stop = stop
        if len(evicted):
            self._index.remove(holder, Tier.DEVICE, run.namespace, run.hashes[evicted])
        if not run.stop:
            assumed.runs.popleft()
        return len(evicted)


def _compact(assumed: _Assumed) -> None:
    """Drop entries that a later run has taken over, when they are many."""
    if assumed.entries <= COMPACT_FACTOR * assumed.capacity_blocks:
        return
    kept: deque[_Run] = deque()
    for run in assumed.runs:
        if assumed.superseded(run):
            continue
        alive = np.flatnonzero(assumed.run_of.get(run.keys[: run.stop]) == run.number)
        if len(alive):
            keys = run.keys[alive]
            kept.append(_Run(run.number, run.at_s, run.namespace, run.hashes[alive], keys, len(keys)))
    assumed.runs = kept
    assumed.entries = sum(run.stop for run in kept)
