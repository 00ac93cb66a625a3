"""Blocks under the names that a source gives them, for sources that tell of a block, not of its copies.

A source's removal often names a block only: not its tokens, its namespace or its tier. This is what has
to be remembered for that. Each block is in a tier once, however often the source says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cache_index.hashing import Hashes, Namespace
from cache_index.radix import CacheIndex
from cache_index.residency import Holder, Tier


class NamedBlock(NamedTuple):
    """What a name stands for; ``tiers`` has bit ``1 << tier`` for each tier that the block is in."""

    namespace: Namespace
    hash: int
    parent: int
    tiers: int


class NamedBlocks:
    """One source's blocks of one holder. Changes the tiers that the source told of, and no others."""

    def __init__(self, index: CacheIndex, holder: Holder) -> None:
        self._index = index
        self._holder = holder
        self._blocks: dict[int, NamedBlock] = {}
        self._told: set[Tier] = set()

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, name: int) -> bool:
        return name in self._blocks

    def __iter__(self) -> Iterator[int]:
        """Names, oldest first."""
        return iter(self._blocks)

    def get(self, name: int) -> NamedBlock | None:
        return self._blocks.get(name)

    def store(
        self, names: Sequence[int], tier: Tier, namespace: Namespace, hashes: Hashes, *, parent: int = 0
    ) -> None:
        """Consecutive blocks of one chain are in a tier. UnknownHolderError as CacheIndex.store."""
        bit = 1 << tier
        missing: list[bool] = []
        for position, (name, value) in enumerate(zip(names, hashes.tolist(), strict=True)):
            known = self._blocks.get(name)
            if known is not None and (known.hash, known.namespace) != (
                value,
                namespace,
            ):  # another block's now
                self.remove([name])
                known = None
            tiers = 0 if known is None else known.tiers
            before = int(hashes[position - 1]) if position else parent
            missing.append(not tiers & bit)
            self._blocks[name] = NamedBlock(namespace, value, before, tiers | bit)
        self._told.add(tier)
        store_missing(self._index, self._holder, tier, namespace, hashes, missing, parent=parent)

    def move(self, name: int, tier: Tier) -> bool:
        """The block is in this tier now, and in no other. False when the name is unknown."""
        known = self._blocks.get(name)
        if known is None:
            return False
        hashes = np.array([known.hash], np.uint64)
        self.store([name], tier, known.namespace, hashes, parent=known.parent)
        for each in Tier:
            if each is not tier:
                self._take(name, each)
        return True

    def remove(self, names: Iterable[int], tier: Tier | None = None) -> int:
        """Blocks have left a tier, or all. Returns how many names were unknown."""
        unknown = 0
        for name in names:
            if name not in self._blocks:
                unknown += 1
                continue
            for each in Tier if tier is None else (tier,):
                self._take(name, each)
        return unknown

    def clear(self, tier: Tier | None = None) -> None:
        """Forget what the source told of a tier, or of all."""
        for each in self._told if tier is None else self._told & {tier}:
            self._index.clear(self._holder, each)
        if tier is None:
            self._blocks.clear()
            return
        keep = ~(1 << tier)
        self._blocks = {
            name: block._replace(tiers=block.tiers & keep)
            for name, block in self._blocks.items()
            if block.tiers & keep
        }

    def restore(self) -> None:
        """Make the index say of the tiers told of what is remembered here, whoever changed it."""
        for each in self._told:
            self._index.clear(self._holder, each)
        for run in _runs(self._blocks.values()):
            hashes = np.array([block.hash for block in run], np.uint64)
            for each in Tier:
                if run[0].tiers & 1 << each:
                    self._index.store(self._holder, each, run[0].namespace, hashes, parent=run[0].parent)

    def _take(self, name: int, tier: Tier) -> None:
        known = self._blocks.get(name)
        bit = 1 << tier
        if known is None or not known.tiers & bit:
            return
        self._index.remove(self._holder, tier, known.namespace, np.array([known.hash], np.uint64))
        if known.tiers == bit:
            del self._blocks[name]
        else:
            self._blocks[name] = known._replace(tiers=known.tiers & ~bit)


def _runs(blocks: Iterable[NamedBlock]) -> Iterator[list[NamedBlock]]:
    """Blocks that follow each other in one chain and lie in the same tiers."""
    run: list[NamedBlock] = []
    for block in blocks:
        last = run[-1] if run else None
        if last is not None and (block.parent, block.namespace, block.tiers) != (
            last.hash,
            last.namespace,
            last.tiers,
        ):
            yield run
            run = []
        run.append(block)
    if run:
        yield run


def store_missing(
    index: CacheIndex,
    holder: Holder,
    tier: Tier,
    namespace: Namespace,
    hashes: Hashes,
    missing: Sequence[bool] | NDArray[np.bool_],
    *,
    parent: int = 0,
) -> None:
    """Store those blocks of a chain that are missing, without a second copy of the others."""
    flags = np.zeros(len(hashes) + 2, np.int8)
    flags[1:-1] = missing
    for start, stop in np.flatnonzero(np.diff(flags)).reshape(-1, 2).tolist():
        before = int(hashes[start - 1]) if start else parent
        index.store(holder, tier, namespace, hashes[start:stop], parent=before)
