"""The prompts that the planner remembers, as a radix tree whose edges are stretches of blocks.

What one turn of a conversation added is one segment. A sequence hash names the whole prefix up to its block, so a
look at a segment's last hash says whether a prompt has all of it: a prompt costs a look per segment of its path,
not per block.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from copy import copy

import msgspec

from cache_index import Namespace
from conductor.actions import Prefix


class Stay(msgspec.Struct, gc=False):
    """At a site: when a prompt that went there had the segment last, and until when it is not to be dropped."""

    last_used_s: float
    held_until_s: float


class Segment(msgspec.Struct, eq=False, gc=False):
    """Blocks ``start`` to ``stop`` of ``prefix``, which is a prompt's that had them last.

    ``uses`` counts prompts that had all of it, the first included; ``gap_s`` is the time between the last two.
    ``children`` are by the hash of their first block. ``held_at`` are the sites where it should lie, by their
    numbers. ``name`` is that of its middle block, without regard to engines: hash and namespace.

    The garbage collector knows nothing of segments: to look through a hundred thousand of them takes it a tenth of
    a second, in which everything else stands still. See `PrefixTree.__del__`.
    """

    parent: Segment | None
    prefix: Prefix
    start: int
    stop: int
    last_used_s: float
    uses: int = 1
    gap_s: float | None = None
    name: int = 0
    children: dict[int, Segment] = {}
    held_at: dict[int, Stay] = {}

    def __post_init__(self) -> None:
        self.name = self._middle()

    @property
    def blocks(self) -> int:
        return self.stop - self.start

    @property
    def key(self) -> int:
        """The hash of its last block, which names everything up to there."""
        return self.prefix.hashes.item(self.stop - 1)

    def begin_at(self, block: int) -> None:
        """What was before is another segment now."""
        self.start = block
        self.name = self._middle()

    def _middle(self) -> int:
        hashed: int = self.prefix.hashes.item((self.start + self.stop) // 2)
        return hashed ^ self.prefix.namespace.domain

    def path(self) -> Iterator[Segment]:
        """This segment and those before it, up to the prompt's beginning."""
        segment: Segment | None = self
        while segment is not None:
            yield segment
            segment = segment.parent

    def __repr__(self) -> str:
        return f"Segment({self.start}:{self.stop}, uses={self.uses}, children={len(self.children)})"


class PrefixTree:
    """At most ``capacity`` segments; ends of prompts that were not used for longest are forgotten first."""

    def __init__(self, capacity: int = 100_000) -> None:
        if capacity < 1:
            raise ValueError(f"capacity must be positive, not {capacity}")
        self._capacity = capacity
        self._roots: dict[Namespace, dict[int, Segment]] = {}
        self._by_use: OrderedDict[Segment, None] = OrderedDict()  # a parent is never before its children
        self._parted: list[Segment] = []

    def __del__(self) -> None:
        """Segments refer to each other: nothing is left of them once they have no parents."""
        for segment in getattr(self, "_by_use", ()):
            segment.parent = None

    def __len__(self) -> int:
        return len(self._by_use)

    def __iter__(self) -> Iterator[Segment]:
        """Those used last come last."""
        return iter(self._by_use)

    def __contains__(self, segment: Segment) -> bool:
        return segment in self._by_use

    def use(self, prefix: Prefix, now_s: float) -> list[Segment]:
        """A prompt came: its path, from the beginning; the last segment is new where its ``uses`` is 1.

        Splits segments where prompts part. Empty for a prompt without a full block.
        """
        path: list[Segment] = []
        hashes, blocks = prefix.hashes, len(prefix.hashes)
        children = self._roots.setdefault(prefix.namespace, {})
        parent: Segment | None = None
        at = 0
        while at < blocks:
            first = hashes.item(at)
            segment = children.get(first)
            if segment is None:
                segment = children[first] = Segment(parent, prefix, at, blocks, now_s)
                self._by_use[segment] = None
            else:
                shared = _shared_blocks(segment, prefix)
                if shared < segment.stop:
                    segment = self._split(segment, shared)
                segment.uses += 1
                segment.gap_s, segment.last_used_s = now_s - segment.last_used_s, now_s
                segment.prefix = prefix  # the older prompt's hashes can go
            path.append(segment)
            parent, children, at = segment, segment.children, segment.stop
        for segment in reversed(path):
            self._by_use.move_to_end(segment)
        return path

    def find(self, prefix: Prefix, stop: int) -> list[Segment]:
        """The segments of a prompt's first ``stop`` blocks that are known whole, from the beginning."""
        path: list[Segment] = []
        children, at = self._roots.get(prefix.namespace, {}), 0
        while at < stop:
            segment = children.get(prefix.hashes.item(at))
            if segment is None or segment.stop > stop or _shared_blocks(segment, prefix) < segment.stop:
                break
            path.append(segment)
            children, at = segment.children, segment.stop
        return path

    def parted(self) -> list[Segment]:
        """The first parts of the segments that were split since the last call."""
        parted, self._parted = self._parted, []
        return parted

    def shrink(self) -> list[Segment]:
        """Forget what there is too much of: those segments, ends before beginnings. To be called after `use`."""
        forgotten = []
        while len(self._by_use) > self._capacity:
            segment, _ = self._by_use.popitem(last=False)
            del self._siblings(segment)[segment.prefix.hashes.item(segment.start)]
            forgotten.append(segment)
        return forgotten

    def _siblings(self, segment: Segment) -> dict[int, Segment]:
        if segment.parent is not None:
            return segment.parent.children
        return self._roots[segment.prefix.namespace]

    def _split(self, segment: Segment, at: int) -> Segment:
        """Part a segment in two at a block; the new one is the first part, and takes the older's place."""
        first = Segment(segment.parent, segment.prefix, segment.start, at, segment.last_used_s)
        first.uses, first.gap_s = segment.uses, segment.gap_s
        first.held_at = {site: copy(stay) for site, stay in segment.held_at.items()}
        self._siblings(segment)[segment.prefix.hashes.item(segment.start)] = first
        segment.parent = first
        segment.begin_at(at)
        first.children[segment.prefix.hashes.item(at)] = segment
        self._by_use[first] = None
        self._parted.append(first)
        return first


def _shared_blocks(segment: Segment, prefix: Prefix) -> int:
    """Up to where a prompt has what a segment has; the first block of the segment is known to be shared."""
    theirs, mine = segment.prefix.hashes, prefix.hashes
    stop = min(segment.stop, len(mine))
    if theirs.item(stop - 1) == mine.item(stop - 1):
        return stop
    low, high = segment.start + 1, stop - 1  # equal up to low, different from high + 1 on
    while low < high:
        middle = (low + high + 1) // 2
        if theirs.item(middle - 1) == mine.item(middle - 1):
            low = middle
        else:
            high = middle - 1
    return low
