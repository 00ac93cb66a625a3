"""A plain Python index with the same answers, and both driven together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from cache_index import CacheIndex, Changes, Holder, Namespace, Tier, kernels
from cache_index.snapshot import load, save

NAMESPACE = Namespace("model", 16)
OTHER = Namespace("model", 16, "adapter")
MOST_COPIES = kernels.MAX_EXTRA_COPIES + 1


def chain(number: int, length: int) -> np.ndarray:
    """Sequence hashes as good as any: distinct words."""
    return np.random.default_rng(number).integers(1, 1 << 64, length, dtype=np.uint64)


class PlainIndex:
    """The same interface over dictionaries, position by position."""

    def __init__(self) -> None:
        self.holders: dict[Holder, int] = {}
        self.copies: dict[tuple[Holder, Tier], Counter[int]] = {}

    def register(self, holder: Holder, row: int) -> None:
        self.holders[holder] = row

    def unregister(self, holder: Holder) -> None:
        self.clear(holder)
        self.holders.pop(holder, None)

    def store(self, holder: Holder, tier: Tier, namespace: Namespace, hashes: np.ndarray) -> None:
        copies = self.copies.setdefault((holder, tier), Counter())
        for each in hashes.tolist():
            key = each ^ namespace.domain
            copies[key] = min(copies[key] + 1, MOST_COPIES)

    def remove(self, holder: Holder, tier: Tier, namespace: Namespace, hashes: np.ndarray) -> None:
        copies = self.copies.get((holder, tier), Counter())
        for each in hashes.tolist():
            key = each ^ namespace.domain
            if copies[key] > 1:
                copies[key] -= 1
            else:
                del copies[key]

    def clear(self, holder: Holder, tier: Tier | None = None) -> None:
        for each in Tier if tier is None else (tier,):
            self.copies.pop((holder, each), None)

    def match(self, namespace: Namespace, hashes: np.ndarray) -> dict[Holder, list[int]]:
        answer = {}
        keys = [each ^ namespace.domain for each in hashes.tolist()]
        for holder in self.holders:
            held = [self.copies.get((holder, tier), {}) for tier in Tier]
            levels = [0] * len(Tier)
            needed = 0  # the lowest tier that has all blocks so far, together with those above it
            for depth, key in enumerate(keys):
                while needed < len(Tier) and not any(key in tier for tier in held[: needed + 1]):
                    levels[needed] = depth
                    needed += 1
                if needed == len(Tier):
                    break
            for level in range(needed, len(Tier)):
                levels[level] = len(keys)
            answer[holder] = levels
        return answer

    def residencies(self, holder: Holder) -> set[tuple[int, Tier]]:
        return {(key, tier) for tier in Tier for key in self.copies.get((holder, tier), ())}


class Both:
    """The index and its oracle, driven together."""

    def __init__(self) -> None:
        self.index = CacheIndex()
        self.plain = PlainIndex()

    def save_and_load(self, path: Path) -> None:
        save(self.index, path)
        self.index = load(path).index

    def register(self, holder: Holder) -> None:
        self.plain.register(holder, self.index.register(holder))

    def unregister(self, holder: Holder) -> None:
        self.index.unregister(holder)
        self.plain.unregister(holder)

    def store(
        self,
        holder: Holder,
        tier: Tier,
        hashes: np.ndarray,
        namespace: Namespace = NAMESPACE,
        *,
        parent: int = 0,
    ) -> None:
        self.index.store(holder, tier, namespace, hashes, parent=parent)
        self.plain.store(holder, tier, namespace, hashes)

    def remove(
        self, holder: Holder, tier: Tier, hashes: np.ndarray, namespace: Namespace = NAMESPACE
    ) -> None:
        self.index.remove(holder, tier, namespace, hashes)
        self.plain.remove(holder, tier, namespace, hashes)

    def apply(
        self,
        stretches: Sequence[tuple[Holder, Tier, bool, np.ndarray]],
        namespace: Namespace = NAMESPACE,
    ) -> None:
        """What was stored (True) and removed, in order; all that is stored begins a chain."""
        owners: list[tuple[Holder, Tier]] = list(
            dict.fromkeys((holder, tier) for holder, tier, *_ in stretches)
        )
        sides: dict[bool, list[int]] = {True: [], False: []}
        rows = []
        for holder, tier, stored, hashes in stretches:
            start = len(sides[stored])
            sides[stored] += hashes.tolist()
            rows.append((owners.index((holder, tier)), stored, start, len(sides[stored]), start))
            (self.plain.store if stored else self.plain.remove)(holder, tier, namespace, hashes)
        chains, removed = (np.array(sides[stored], np.uint64) for stored in (True, False))
        self.index.apply(owners, namespace, Changes(np.array(rows, np.int64).reshape(-1, 5), chains, removed))

    def clear(self, holder: Holder, tier: Tier | None = None) -> None:
        self.index.clear(holder, tier)
        self.plain.clear(holder, tier)

    def check_match(self, hashes: np.ndarray, namespace: Namespace = NAMESPACE) -> None:
        levels = self.index.match(namespace, hashes)
        expected = self.plain.match(namespace, hashes)
        assert {holder: levels[row].tolist() for holder, row in self.plain.holders.items()} == expected
        for holder in expected:
            held = [self.index.held_run(holder, tier, namespace, hashes) for tier in Tier]
            assert held == expected[holder]
        rows = set(self.plain.holders.values())
        assert not any(levels[row].any() for row in range(len(levels)) if row not in rows)

    def check_residencies(self) -> None:
        for holder in self.plain.holders:
            assert self.index.residencies(holder) == self.plain.residencies(holder)
            for tier in Tier:
                held = self.index.held_blocks(holder, tier)
                assert held == len(self.plain.copies.get((holder, tier), ()))
        stats = self.index.stats()
        for holder, tiers in stats.residencies_by_holder.items():
            assert tiers == {tier: len(self.plain.copies.get((holder, tier), ())) for tier in tiers}
        assert stats.residencies == sum(len(copies) for copies in self.plain.copies.values())

    def check_reclaimed(self) -> None:
        """After the background work nothing of the past is left."""
        while self.index.reclaim():
            pass
        alive = {key for copies in self.plain.copies.values() for key in copies}
        stats = self.index.stats()
        assert stats.blocks == len(alive)
        assert stats.retired_slots == 0
