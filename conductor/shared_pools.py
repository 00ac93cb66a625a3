"""Shared pools: stores that several instances load from, so that what a store holds counts for each of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cache_index import CacheIndex, Holder, Tier
from cache_index.kernel_set import compiled
from conductor.costs.held import RAISE_BY_POOL, raise_by_pool

Levels = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class SharedPool:
    """A holder of the index that instances load from. ``tier`` is the one that its blocks are in for them.

    ``members`` are instance ids, None: all instances.
    """

    holder: Holder
    tier: Tier
    members: frozenset[str] | None = None

    def serves(self, instance_id: str) -> bool:
        return self.members is None or instance_id in self.members


class SharedPools:
    """Several pools over one index; instances may come and go. A pool is nobody's member."""

    def __init__(self, index: CacheIndex, pools: Sequence[SharedPool]) -> None:
        self._index = index
        self._pools = pools
        self._holders = frozenset(pool.holder for pool in pools)
        self._registrations = -1
        self._raise = compiled(raise_by_pool, *RAISE_BY_POOL)
        self._reaches: list[tuple[int, Levels]] = []  # a pool's row, and 1 where its blocks count, else 0

    def raise_levels(self, levels: Levels) -> None:
        """Count what pools hold as held by their members, from the pool's tier on.

        ``levels`` [holder row, tier] are blocks as `CacheIndex.match` gives them. They are prefixes from the
        first block on, and so is what an instance loads from a pool: the longer of the two is what it can have.
        """
        if self._registrations != self._index.registrations:
            self._find_members()
        for row, reach in self._reaches:
            self._raise(levels, reach, row)  # rows registered by another thread since the match are not in it

    def _find_members(self) -> None:
        self._registrations, rows = self._index.registered()
        self._reaches = []
        for pool in self._pools:
            if pool.holder in rows:
                reach = np.zeros((max(rows.values()) + 1, len(Tier)), np.int32)
                reach[[row for holder, row in rows.items() if self._is_member(holder, pool)], pool.tier :] = 1
                self._reaches.append((rows[pool.holder], reach))

    def _is_member(self, holder: Holder, pool: SharedPool) -> bool:
        return holder not in self._holders and pool.serves(holder.instance_id)
