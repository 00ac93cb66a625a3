"""Saving and loading: everything comes back, and nothing but a good snapshot is taken."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from index_oracle import NAMESPACE, OTHER, Both, chain

from cache_index import CacheIndex, Holder, Tier
from cache_index.snapshot import MAGIC, SnapshotError, load, save


def full_index() -> CacheIndex:
    index = CacheIndex(max_blocks=100_000)
    for number in range(80):
        index.register(Holder(f"h{number}", number % 3))
    for number in range(80):
        holder = Holder(f"h{number}", number % 3)
        index.store(holder, Tier.DEVICE, NAMESPACE, chain(1, 200)[: 100 + number])
        index.store(holder, Tier(number % 5), OTHER, chain(number, 50))
    linked = chain(500, 30)
    index.store_linked(Holder("h0", 0), Tier.HOST, NAMESPACE, linked, linked ^ np.uint64(77))
    index.store(Holder("h0", 0), Tier.HOST, NAMESPACE, linked[:10])
    index.remove(Holder("h5", 2), Tier.DEVICE, NAMESPACE, chain(1, 200)[40:41])
    index.clear(Holder("h6", 0))
    index.unregister(Holder("h7", 1))
    return index


def same(first: CacheIndex, second: CacheIndex) -> None:
    one, other = first.stats(), second.stats()
    assert one.residencies_by_holder == other.residencies_by_holder
    assert (one.blocks, one.gaps, one.retired_slots) == (other.blocks, other.gaps, other.retired_slots)
    assert (one.max_blocks, one.dropped_residencies) == (other.max_blocks, other.dropped_residencies)
    for namespace, hashes in (
        (NAMESPACE, chain(1, 200)),
        (OTHER, chain(11, 50)),
        (NAMESPACE, chain(500, 30)),
    ):
        np.testing.assert_array_equal(first.match(namespace, hashes), second.match(namespace, hashes))
    assert first.tree() == second.tree()
    for holder in one.residencies_by_holder:
        assert first.holder_id(holder) == second.holder_id(holder)
        assert first.residencies(holder) == second.residencies(holder)


def test_everything_comes_back(tmp_path: Path) -> None:
    index = full_index()
    save(index, tmp_path / "index")
    loaded = load(tmp_path / "index")
    same(index, loaded)
    linked = chain(500, 30)
    for each in (index, loaded):  # links and copies
        assert each.remove_linked(Holder("h0", 0), Tier.HOST, linked ^ np.uint64(77)) == 0
        row = each.holder_id(Holder("h0", 0))
        assert each.match(NAMESPACE, linked)[row].tolist() == [0, 10, 10, 10, 10]
        while each.reclaim():
            pass
    same(index, loaded)
    assert [prefix.hash for prefix in loaded.hot_prefixes()]


def test_an_empty_index(tmp_path: Path) -> None:
    save(CacheIndex(), tmp_path / "index")
    assert load(tmp_path / "index").stats().residencies == 0


def test_saving_while_tables_grow(tmp_path: Path) -> None:
    both = Both()
    both.register(Holder("a"))
    number = 0
    while not both.index._arrays.growing:
        both.store(Holder("a"), Tier.DEVICE, chain(number, 7))
        number += 1
    both.save_and_load(tmp_path / "index")
    both.check_residencies()
    both.store(Holder("a"), Tier.DEVICE, chain(number, 4000))
    both.check_residencies()


def test_a_snapshot_replaces_the_one_before_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "index"
    save(CacheIndex(), path)
    index = full_index()
    save(index, path)
    same(index, load(path))
    assert [each.name for each in tmp_path.iterdir()] == ["index"]
    with pytest.raises(FileNotFoundError):
        save(index, tmp_path / "nowhere" / "index")


def refused(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    with pytest.raises(SnapshotError) as caught:
        load(path)
    return str(caught.value)


def test_what_is_no_snapshot_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "index"
    save(full_index(), path)
    good = path.read_bytes()
    assert "not a snapshot" in refused(path, b"")
    assert "not a snapshot" in refused(path, b"PK\x03\x04 something else entirely")
    assert "truncated" in refused(path, good[:12])
    assert "truncated" in refused(path, good[:40])
    assert "truncated" in refused(path, good[:-8])
    assert "too long" in refused(path, good + b"12345678")
    newer = MAGIC + (9).to_bytes(4, "little") + good[12:]
    assert "version 9, which is newer than 1" in refused(path, newer)
    assert str(path) in refused(path, good[:-1])
    with pytest.raises(SnapshotError, match="cannot read"):
        load(tmp_path / "missing")
    path.write_bytes(good)
    load(path)


def test_any_flipped_bit_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "index"
    save(full_index(), path)
    good = path.read_bytes()
    for position in (*range(8, 400, 13), *range(400, len(good), len(good) // 60), len(good) - 1):
        damaged = bytearray(good)
        damaged[position] ^= 1 << (position % 8)
        assert refused(path, bytes(damaged))
