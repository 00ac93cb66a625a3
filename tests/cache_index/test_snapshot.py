"""Saving and loading: everything comes back, and nothing but a good snapshot is taken."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import numpy as np
import pytest
from index_oracle import NAMESPACE, OTHER, Both, chain

from cache_index import CacheIndex, Holder, StreamConfig, StreamPosition, Tier, snapshot
from cache_index.replay import Position
from cache_index.snapshot import MAGIC, SnapshotError, load, save
from cache_index.streams import EngineTraits


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
    loaded = load(tmp_path / "index", max_blocks=100_000).index
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
    assert load(tmp_path / "index").index.stats().residencies == 0


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
    same(index, load(path, max_blocks=100_000).index)
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
    assert "version 9, which is newer than 2" in refused(path, newer)
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


def test_bounds_are_those_of_the_process_that_loads(tmp_path: Path) -> None:
    index = full_index()
    save(index, tmp_path / "index")
    assert load(tmp_path / "index").index.max_blocks is None
    assert load(tmp_path / "index", expected_blocks=200_000).index.stats().bytes > index.stats().bytes
    smaller = load(tmp_path / "index", max_blocks=500).index
    assert smaller.max_blocks == 500
    assert smaller.stats().blocks <= 500 < index.stats().blocks
    assert smaller.stats().dropped_residencies > 0


def position(holder: Holder, tiers: frozenset[Tier] | None = None) -> StreamPosition:
    config = StreamConfig(
        holder, "model", "tcp://e:1", "tcp://e:2", topic="kv", block_size=16, tenant="t", tiers=tiers
    )
    return StreamPosition(config, Position(41, b"digest", True), EngineTraits(2, True, True, 4))


def test_positions_of_streams_come_back_with_the_index(tmp_path: Path) -> None:
    told = [position(Holder("h0")), position(Holder("h3"), frozenset({Tier.HOST, Tier.DISK}))]
    report = save(full_index(), tmp_path / "index", lambda: nullcontext(told))
    assert report.positions == load(tmp_path / "index").positions == tuple(told)
    assert report.file_bytes == (tmp_path / "index").stat().st_size


def test_what_no_stream_continues_is_forgotten(tmp_path: Path) -> None:
    index = full_index()
    told = [position(Holder("h0")), position(Holder("h3"), frozenset({Tier.HOST, Tier.POD}))]
    save(index, tmp_path / "index", lambda: nullcontext(told))
    loaded = load(tmp_path / "index")
    loaded.keep_streams()
    held = loaded.index.stats().residencies_by_holder
    before = index.stats().residencies_by_holder
    assert held[Holder("h0")] == before[Holder("h0")]
    assert held[Holder("h3")] == {Tier.POD: before[Holder("h3")][Tier.POD]}
    assert set(held) == {Holder("h0"), Holder("h3")}
    assert loaded.index.holder_id(Holder("h1", 1)) is None


def test_an_index_that_changes_and_grows_is_saved_whole(tmp_path: Path) -> None:
    """Chains are stored whole under the lock that pauses them, so a snapshot has whole chains."""
    index, lock, stop = CacheIndex(), threading.Lock(), threading.Event()
    holder = Holder("a")
    index.register(holder)
    stored = 0

    @contextmanager
    def paused() -> Iterator[list[StreamPosition]]:
        with lock:
            yield [StreamPosition(position(holder).config, Position(stored, b"", True))]

    def store() -> None:
        nonlocal stored
        while not stop.is_set():
            with lock:
                for part in np.split(chain(stored, 60), 3):
                    index.store(holder, Tier.DEVICE, NAMESPACE, part)
                stored += 1

    thread = threading.Thread(target=store)
    thread.start()
    try:
        for _ in range(10):
            save(index, tmp_path / "index", paused)
            loaded = load(tmp_path / "index")
            chains = loaded.positions[0].position.last_sequence
            assert loaded.index.stats().residencies == 60 * chains
            assert chains == 0 or loaded.index.match(NAMESPACE, chain(chains - 1, 60))[0, 0] == 60
    finally:
        stop.set()
        thread.join()


def test_entries_of_another_size_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "index"
    save(full_index(), path)
    monkeypatch.setitem(snapshot.ENTRY_BYTES, "NODES", 32)
    with pytest.raises(SnapshotError, match="another size"):
        load(path)
