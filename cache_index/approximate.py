"""Residency of engines that publish no events: what was routed to them is assumed to be stored.

Assumptions live in the same index as reported residencies. An engine's cache is taken to evict the least
recently used blocks, of one request the deepest first, and nothing is believed longer than a time to live.
"""

from __future__ import annotations

from collections import OrderedDict
from math import inf

import msgspec

from cache_index import kernels
from cache_index.hashing import Hashes, Namespace
from cache_index.kernel_set import entry_point
from cache_index.radix import CacheIndex
from cache_index.residency import Holder, Tier

DEFAULT_TTL_S = 120.0
DEFAULT_CAPACITY_BLOCKS = 16_384


class LastUsed(msgspec.Struct, frozen=True, gc=False):
    """For each of a chain's leading blocks, the number of the call that routed it to a holder last.

    Blocks of one call stand together: up to the first of ``stops`` they have the first of ``numbers``, and so on.
    """

    stops: tuple[int, ...] = ()
    numbers: tuple[int, ...] = ()

    def __len__(self) -> int:
        return self.stops[-1] if self.stops else 0

    def __getitem__(self, block: int) -> int:
        for stop, number in zip(self.stops, self.numbers, strict=True):
            if block < stop:
                return number
        raise IndexError(block)


_NEVER = LastUsed()


class _Run(msgspec.Struct, gc=False):
    """What is left of one assumption: those blocks of its chain that no later run has, from the ``first`` on.

    A later run takes over what the two chains have in common, which is the beginning of both; what is evicted goes
    from the end. So nothing is ever missing in the middle, and a run is found by the first block that it has left.
    """

    number: int
    at_s: float
    namespace: Namespace
    first: int
    hashes: Hashes

    @property
    def key(self) -> int:
        """Of the first block that is left."""
        return self.hashes.item(0) ^ self.namespace.domain


class _Assumed:
    """What one holder is assumed to have: a run has each block, the one that it was last in."""

    __slots__ = ("_common", "beginnings", "blocks", "capacity_blocks", "expires_s", "runs")

    def __init__(self, capacity_blocks: int) -> None:
        self.capacity_blocks = capacity_blocks
        self.blocks = 0
        self.runs: OrderedDict[int, _Run] = OrderedDict()  # by number, the oldest first
        self.beginnings: dict[int, _Run] = {}  # the same, by the first block that each has left
        self.expires_s = inf  # no run does before
        self._common = entry_point(kernels.common)

    def take_over(self, namespace: Namespace, hashes: Hashes) -> LastUsed:
        """Take the leading blocks of a chain from the runs that have them.

        O(runs * log(blocks)): sequence hashes that are equal stand for equal beginnings.
        """
        domain, beginnings = namespace.domain, self.beginnings
        stops, numbers, blocks, position = [], [], len(hashes), 0
        while position < blocks:
            key = hashes.item(position) ^ domain
            run = beginnings.get(key)
            if run is None or run.first != position or not _same(run.namespace, namespace):
                break
            theirs = run.hashes
            common: int = self._common(theirs, hashes, position)
            if not common:
                break
            del beginnings[key]
            if common < len(theirs):
                run.first += common
                run.hashes = theirs[common:].copy()  # a view would keep the whole array
                beginnings[run.key] = run
            else:
                del self.runs[run.number]
            position += common
            stops.append(position)
            numbers.append(run.number)
        self.blocks -= position
        return LastUsed(tuple(stops), tuple(numbers))

    def drop_last(self, blocks: int) -> tuple[Namespace, Hashes]:
        """Take the last of the oldest run's blocks, at most so many, and return them."""
        run = next(iter(self.runs.values()))
        keep = len(run.hashes) - blocks
        if keep > 0:
            dropped, run.hashes = run.hashes[keep:], run.hashes[:keep]
        else:
            dropped = run.hashes
            del self.beginnings[run.key], self.runs[run.number]
        self.blocks -= len(dropped)
        return run.namespace, dropped


def _same(one: Namespace, other: Namespace) -> bool:
    return one is other or one == other


class ApproximateResidency:
    """Keeps assumptions of the holders that were added; calls for any other holder do nothing.

    Not thread-safe. A call costs O(blocks that are new), eviction amortised; a holder never has more blocks in the
    index than its capacity.
    """

    def __init__(self, index: CacheIndex, *, ttl_s: float = DEFAULT_TTL_S) -> None:
        self._index = index
        self._ttl_s = ttl_s
        self._holders: dict[Holder, _Assumed] = {}
        self.predicted = self._holders.keys()  # whose residencies are assumptions
        self._runs = 0

    def blocks(self, holder: Holder) -> int:
        """How many blocks a holder is assumed to have."""
        assumed = self._holders.get(holder)
        return 0 if assumed is None else assumed.blocks

    def add(self, holder: Holder, capacity_blocks: int = DEFAULT_CAPACITY_BLOCKS) -> None:
        """Begin to assume for a holder, which is registered; known assumptions are kept."""
        if capacity_blocks <= 0:
            raise ValueError(f"capacity_blocks must be positive, not {capacity_blocks}")
        self._index.register(holder)
        assumed = self._holders.setdefault(holder, _Assumed(capacity_blocks))
        assumed.capacity_blocks = capacity_blocks
        lost = self._evict(holder, assumed)
        if lost is not None:
            self._remove(holder, *lost)

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

    def assume(self, holder: Holder, namespace: Namespace, hashes: Hashes, now_s: float) -> LastUsed:
        """A request with these blocks was sent to the holder.

        Returns for each of the leading blocks that had been assumed the number of the call, growing from one to
        the next, that routed it there last; ends at the first that had not. Of a chain longer than the capacity
        its beginning is kept.
        """
        assumed = self._holders.get(holder)
        if assumed is None:
            return _NEVER
        if assumed.expires_s <= now_s:
            self._expire(holder, assumed, now_s)
        blocks, capacity = len(hashes), assumed.capacity_blocks
        if blocks > capacity:
            blocks = capacity
            hashes = hashes[:blocks]
        if not blocks:
            return _NEVER
        self._runs = (number := self._runs) + 1
        key, beginnings, runs = hashes.item(0) ^ namespace.domain, assumed.beginnings, assumed.runs
        last_used, known = _NEVER, 0
        if key in beginnings:
            last_used = assumed.take_over(namespace, hashes)
            known = len(last_used)
        if not runs:
            assumed.expires_s = now_s + self._ttl_s
        runs[number] = beginnings[key] = _Run(number, now_s, namespace, 0, hashes)
        assumed.blocks = held = assumed.blocks + blocks
        lost = self._evict(holder, assumed) if held > capacity else None
        if not known:
            self._index.exchange(holder, lost, namespace, hashes)
        elif known < blocks:
            new, parent = hashes[known:], hashes.item(known - 1)
            self._index.exchange(holder, lost, namespace, new, parent=parent)
        return last_used

    def evicted(self, holder: Holder, last_used: int) -> int:
        """The engine turned out to have evicted a block that the call to `assume` of this number used last.

        An LRU cache has then evicted everything that was not used since; returns how many blocks that was.
        """
        assumed = self._holders.get(holder)
        if assumed is None:
            return 0
        before = assumed.blocks
        while assumed.runs and next(iter(assumed.runs)) <= last_used:
            self._drop_last(holder, assumed, assumed.blocks)
        return before - assumed.blocks

    def expire(self, now_s: float) -> None:
        """Drop what was not assumed again within the time to live, of all holders."""
        for holder, assumed in self._holders.items():
            self._expire(holder, assumed, now_s)

    def _expire(self, holder: Holder, assumed: _Assumed, now_s: float) -> None:
        assumed.expires_s = inf
        while assumed.runs:
            ends_s = next(iter(assumed.runs.values())).at_s + self._ttl_s
            if ends_s > now_s:
                assumed.expires_s = ends_s
                return
            self._drop_last(holder, assumed, assumed.blocks)

    def _evict(self, holder: Holder, assumed: _Assumed) -> tuple[Namespace, Hashes] | None:
        """Drop what is too much; returns the last piece of it, which is still to be taken from the index."""
        lost = None
        while assumed.blocks > assumed.capacity_blocks:
            if lost is not None:
                self._remove(holder, *lost)
            lost = assumed.drop_last(assumed.blocks - assumed.capacity_blocks)
        return lost

    def _drop_last(self, holder: Holder, assumed: _Assumed, blocks: int) -> None:
        self._remove(holder, *assumed.drop_last(blocks))

    def _remove(self, holder: Holder, namespace: Namespace, dropped: Hashes) -> None:
        self._index.remove(holder, Tier.DEVICE, namespace, dropped[::-1])
