"""Tables of many megabytes: growth in steps, on pages that are used again."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from index_oracle import NAMESPACE

from cache_index import CacheIndex, Holder, Tier, table_memory
from cache_index import kernels as k
from cache_index.snapshot import load, save
from cache_index.table_memory import HUGE_PAGE, TableMemory

CHAIN = 500


def test_pages_move_with_their_content_elsewhere_zeroed() -> None:
    source, target = TableMemory(8 * HUGE_PAGE), TableMemory(9 * HUGE_PAGE)
    source.bytes[:] = 7
    target.bytes[: HUGE_PAGE + 5] = 9
    source.hand_over(3 * HUGE_PAGE + 100, target, HUGE_PAGE + 5)
    assert source.released == 3 * HUGE_PAGE
    assert not source.bytes[: 3 * HUGE_PAGE].any()
    assert (source.bytes[3 * HUGE_PAGE :] == 7).all()
    assert (target.bytes[: HUGE_PAGE + 5] == 9).all()
    assert not target.bytes[HUGE_PAGE + 5 :].any()
    source.hand_over(8 * HUGE_PAGE, target, HUGE_PAGE + 5)  # more than fits
    assert not target.bytes[HUGE_PAGE + 5 :].any()


@pytest.mark.parametrize(("can_move_pages", "foreseen"), [(True, 0), (False, 0), (True, 5_000_000)])
def test_nothing_is_lost_while_large_tables_grow(
    can_move_pages: bool, foreseen: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if not can_move_pages:
        monkeypatch.setattr(table_memory, "_move_page", lambda source, target: False)
    index = CacheIndex()
    fleet = [Holder("a"), Holder("b")]
    rows = [index.register(holder) for holder in fleet]
    words = np.random.default_rng(5).integers(1, 1 << 64, 1_500_000, dtype=np.uint64)
    chains = words.reshape(-1, CHAIN)
    growths = 0
    dice = np.random.default_rng(6)
    for number, hashes in enumerate(chains):
        index.store_linked(fleet[number % 2], Tier.DEVICE, NAMESPACE, hashes, hashes + np.uint64(1))
        if number == 800:
            index.expect(foreseen)
        if number % 7 == 0:
            index.remove(fleet[number % 2], Tier.DEVICE, NAMESPACE, hashes[400:][::-1])
        growths += index._arrays.is_growing(k.NODES)
        seen = int(dice.integers(number + 1))
        depth = 400 if seen % 7 == 0 else CHAIN
        assert index.match(NAMESPACE, chains[seen])[rows[seen % 2], 0] == depth
        assert index.resolve(int(hashes[17]) + 1 & (1 << 64) - 1, NAMESPACE) == int(hashes[17])
    assert growths > 0
    expected = 1_500_000 - 100 * -(-len(chains) // 7)
    stats = index.stats()
    assert stats.blocks == stats.residencies == expected
    assert stats.gaps == 0
    save(index, tmp_path / "index")
    loaded = load(tmp_path / "index").index
    assert loaded.stats().residencies_by_holder == stats.residencies_by_holder
    for number in range(0, len(chains), 97):
        depth = 400 if number % 7 == 0 else CHAIN
        assert loaded.match(NAMESPACE, chains[number])[rows[number % 2], 0] == depth


def test_bytes_per_residency() -> None:
    """What the arrays take, all growth included, once the tables are not small any more."""
    index = CacheIndex()
    fleet = [Holder(f"h{number}") for number in range(100)]
    for holder in fleet:
        index.register(holder)
    words = np.random.default_rng(5).integers(1, 1 << 64, 2_800_000, dtype=np.uint64).reshape(-1, 125)
    for number, hashes in enumerate(words):
        index.store(fleet[number % 100], Tier.DEVICE, NAMESPACE, hashes)
        if number % 500 == 0 and number * 125 > 1_750_000:
            stats = index.stats()
            assert stats.bytes / stats.residencies < 30.5


def test_crowded_positions_make_a_table_grow() -> None:
    """Keys that all begin at the last position."""
    index = CacheIndex()
    index.register(Holder("a"))
    inverse = pow(0x9E3779B97F4A7C15, -1, 1 << 64)
    mixed = [(1 << 64) - 1 - number for number in range(6_000)]
    keys = np.array([each * inverse % (1 << 64) for each in mixed], np.uint64)
    hashes = keys ^ NAMESPACE.domain_word
    for start in range(0, 6_000, 50):
        index.store(Holder("a"), Tier.DEVICE, NAMESPACE, hashes[start : start + 50])
    assert index.stats().blocks == 6_000
    assert index.residencies(Holder("a")) == {(key, Tier.DEVICE) for key in keys.tolist()}
