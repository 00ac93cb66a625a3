"""The radix tree for those who look at it: from the roots, or below one block.

The table is read in pages, and the index goes on between them; what changes meanwhile may be missing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from cache_index import kernels as k
from cache_index.residency import TreeNode

if TYPE_CHECKING:
    from cache_index.radix import CacheIndex

PAGE_POSITIONS = 1 << 17  # read under one lock: a millisecond or two
DEPTHS = 1 << 14  # told apart when there are more blocks than wanted
ANY_DEPTH = k.UNKNOWN + 1  # blocks of an unknown depth come last
FIRST_LEVELS = 64  # read below a block at once, then twice as many each time
MOST_READ = 2_000_000  # blocks that are looked through at once

Triples = NDArray[np.uint64]  # key, depth and parent's key of a node a row


@dataclass(frozen=True, slots=True)
class TreeView:
    """Some blocks, the least deep first. ``sampled``: not all that belong here could be read."""

    nodes: list[TreeNode]
    sampled: bool


class _Pages:
    """Reads of the whole table, a page at a time."""

    def __init__(self, index: CacheIndex) -> None:
        self._index = index
        self.sampled = False

    def addresses(self) -> Iterator[tuple[int, int]]:
        """The state's address and the first position of every page, with the index locked for each."""
        first, arrays = 0, self._index._arrays
        with self._index._lock:
            if arrays.capacity(k.NODES) <= PAGE_POSITIONS:
                arrays.finish_growth(k.NODES)
            capacity = arrays.capacity(k.NODES)
        while first < capacity:
            with self._index._lock:
                if arrays.is_growing(k.NODES) or arrays.capacity(k.NODES) != capacity:
                    self.sampled = True
                yield arrays.address, first
            first += PAGE_POSITIONS

    def counts(self) -> NDArray[np.uint64]:
        """How many nodes there are at each depth; the last count takes all deeper."""
        counts = np.zeros(DEPTHS, np.uint64)
        for address, first in self.addresses():
            k.count_by_depth(address, first, PAGE_POSITIONS, counts)
        return counts

    def nodes(self, low: int, high: int, most: int) -> Triples:
        """At most so many nodes with low <= depth < high, by depth."""
        found, room = [np.empty((0, 3), np.uint64)], most
        for address, first in self.addresses():
            page = np.empty(3 * min(room, 2 * PAGE_POSITIONS), np.uint64)
            count = int(k.nodes_by_depth(address, first, PAGE_POSITIONS, low, high, page))
            found.append(page.reshape(-1, 3)[:count])
            room -= count
        triples = np.concatenate(found)
        return triples[np.argsort(triples[:, 1], kind="stable")]


def view_from_roots(index: CacheIndex, limit: int) -> TreeView:
    """At most ``limit`` blocks, those near the roots first."""
    pages = _Pages(index)
    fitting = int(np.searchsorted(np.cumsum(pages.counts()), limit, side="right"))
    whole = min(fitting, DEPTHS - 1)  # depths shown in full; of the next one what still fits
    found = pages.nodes(0, whole, limit)
    beyond = whole + 1 if whole < DEPTHS - 1 else ANY_DEPTH
    found = np.concatenate([found, pages.nodes(whole, beyond, limit - len(found))])
    return TreeView(_described(index, found), pages.sampled)


def view_below(index: CacheIndex, root: int, limit: int) -> TreeView | None:
    """A block and at most ``limit - 1`` of those that continue it; None when there is no such block."""
    description = np.empty(3, np.uint64)
    with index._lock:
        if not k.describe_node(index._arrays.address, np.uint64(root), description):
            return None
    pages = _Pages(index)
    depth = int(description[0])
    below = np.cumsum(pages.counts())
    found = [np.array([[root, *description[:2].tolist()]], np.uint64)]
    taken, levels = 1, FIRST_LEVELS
    while depth < k.UNKNOWN and taken < limit:
        levels = _fitting(below, depth, levels)
        triples = pages.nodes(depth + 1, min(depth + 1 + levels, k.UNKNOWN), MOST_READ + 1)
        pages.sampled |= len(triples) > MOST_READ
        frontier = found[-1][:, 0]
        for level in range(depth + 1, depth + 1 + levels):
            bounds = np.searchsorted(triples[:, 1], [level, level + 1])
            rows = triples[bounds[0] : bounds[1]]
            children = rows[np.isin(rows[:, 2], frontier)][: limit - taken]
            if not len(children):
                return TreeView(_described(index, np.concatenate(found)), pages.sampled)
            found.append(children)
            taken, frontier = taken + len(children), children[:, 0]
            if taken == limit:
                break
        depth, levels = depth + levels, 2 * levels
    return TreeView(_described(index, np.concatenate(found)), pages.sampled)


def _fitting(below: NDArray[np.uint64], depth: int, levels: int) -> int:
    """So many levels below ``depth`` at most, fewer where more blocks lie there than are read at once."""
    if depth >= len(below):
        return levels
    last = int(np.searchsorted(below, int(below[depth]) + MOST_READ, side="right")) - 1
    return max(1, min(levels, last - depth))


def _described(index: CacheIndex, triples: Triples) -> list[TreeNode]:
    with index._lock:
        slots = np.empty(index._arrays.slot_capacity, np.uint64)
        return [_node(index, key, depth, parent, slots) for key, depth, parent in triples.tolist()]


def _node(index: CacheIndex, key: int, depth: int, parent: int, slots: NDArray[np.uint64]) -> TreeNode:
    count = k.slots_of_node(index._arrays.address, np.uint64(key), slots)
    holders = [index._slots.owner(int(slot)) for slot in slots[:count]]
    return TreeNode(
        hash=key,
        parent=parent or None,
        depth=None if depth == k.UNKNOWN else depth,
        holders=tuple(holder for holder in holders if holder is not None),
    )
