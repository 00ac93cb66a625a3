"""Hot prefixes as a tree: which of them continue others, and who holds them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from cache_index import kernels as k
from cache_index.residency import Holder, HotPrefix, Tier

if TYPE_CHECKING:
    from cache_index.radix import CacheIndex

_MOST_STEPS = 20_000  # towards the roots, over all prefixes
_STEPS_AT_ONCE = 256  # with the index locked
MOST_NAMED = 20  # of the holders of a prefix


@dataclass(frozen=True, slots=True)
class HotBranch:
    """``above`` is the nearest hot prefix that this one continues, by its ``hash``; None: none, or too far away.

    ``held_by`` names at most `MOST_NAMED` of its holders.
    """

    prefix: HotPrefix
    above: int | None
    held_by: tuple[tuple[Holder, Tier], ...]


def hot_branches(index: CacheIndex, limit: int) -> list[HotBranch]:
    """The ``limit`` hottest prefixes, most matches first. O(blocks between them), bounded."""
    prefixes = index.hot_prefixes(limit=limit)
    hot = {prefix.hash for prefix in prefixes}
    steps_left = _MOST_STEPS
    branches = []
    for prefix in prefixes:
        above = prefix.parent
        while above is not None and above not in hot and steps_left > 0:
            steps = min(_STEPS_AT_ONCE, steps_left)
            steps_left -= steps
            above = _ancestor(index, above, hot, steps)
        branches.append(HotBranch(prefix, above if above in hot else None, _held_by(index, prefix.hash)))
    return branches


def _ancestor(index: CacheIndex, key: int, hot: set[int], steps: int) -> int | None:
    """So many steps from a block towards its root, fewer where a hot one is met; None beyond the root."""
    description = np.empty(3, np.uint64)
    with index._lock:
        for _ in range(steps):
            if not k.describe_node(index._arrays.address, np.uint64(key), description):
                return None
            key = int(description[1])
            if not key or key in hot:
                break
    return key or None


def _held_by(index: CacheIndex, key: int) -> tuple[tuple[Holder, Tier], ...]:
    with index._lock:
        slots = np.empty(index._arrays.slot_capacity, np.uint64)
        count = k.slots_of_node(index._arrays.address, np.uint64(key), slots)
        owners = [index._slots.owner(int(slot)) for slot in slots[: min(count, MOST_NAMED)]]
    return tuple(owner for owner in owners if owner is not None)
