"""Saving and restoring what streams can continue, and who was registered."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from kv_publisher import KvPublisher
from structlog.testing import capture_logs
from waiting import wait_for

from cache_index import CacheIndex, Holder, Namespace, StreamConfig, Tier, VllmEventSource, sequence_hashes
from conductor.index_registrations import RegistrationBook
from conductor.index_snapshots import IndexSnapshots, restore
from conductor.indexer import Registration
from conductor.state_store import FileStateStore, MemoryStateStore

ENGINE, OTHER = Holder("engine"), Holder("other")
TOKENS = list(range(64))


@pytest.fixture
def publisher() -> Iterator[KvPublisher]:
    made = KvPublisher()
    yield made
    made.close()


@pytest.fixture
def source() -> Iterator[VllmEventSource]:
    made = VllmEventSource(CacheIndex())
    made.start()
    yield made
    made.close()


def follow(source: VllmEventSource, publisher: KvPublisher) -> None:
    source.add_stream(StreamConfig(ENGINE, "m", publisher.endpoint, publisher.replay_endpoint))
    wait_for(lambda: source.stream_stats()[0].state == "warm")


def test_only_what_is_new_is_saved(tmp_path: Path, source: VllmEventSource, publisher: KvPublisher) -> None:
    path = tmp_path / "index"
    snapshots = IndexSnapshots(path, source._index, source, interval_s=3600)
    follow(source, publisher)
    for number in range(3):
        publisher.stored([number], TOKENS[:16], 16)
        wait_for(lambda: source.stream_stats()[0].last_seq == len(publisher._batches) - 1)
        for _ in range(2):
            snapshots.save()
        assert snapshots.saves == number + 1
    path.unlink()
    snapshots.close()
    assert (snapshots.saves, snapshots.failures) == (4, 0)
    assert snapshots.file_bytes == path.stat().st_size
    assert 0 < snapshots.locked_s < snapshots.took_s


def test_it_saves_every_now_and_then(tmp_path: Path, source: VllmEventSource, publisher: KvPublisher) -> None:
    snapshots = IndexSnapshots(tmp_path / "index", source._index, source, interval_s=0.01)
    snapshots.start()
    follow(source, publisher)
    wait_for(lambda: snapshots.saves == 1)
    publisher.stored([1], TOKENS[:16], 16)
    wait_for(lambda: snapshots.saves == 2)
    snapshots.close()
    assert snapshots.failures == 0


def test_what_cannot_be_written_is_counted_and_tried_again(tmp_path: Path, source: VllmEventSource) -> None:
    folder = tmp_path / "later"
    snapshots = IndexSnapshots(folder / "index", source._index, source, interval_s=3600)
    with capture_logs() as logs:
        snapshots.save()
    assert (snapshots.saves, snapshots.failures) == (0, 1)
    assert [each["event"] for each in logs] == ["the index cannot be saved"]
    folder.mkdir()
    snapshots.close()
    assert (snapshots.saves, snapshots.failures) == (1, 1)


def test_residencies_that_nobody_can_continue_are_not_restored(
    tmp_path: Path, source: VllmEventSource, publisher: KvPublisher
) -> None:
    publisher.stored([1, 2], TOKENS[:32], 16)
    follow(source, publisher)
    index, namespace = source._index, Namespace("m", 16)
    hashes = sequence_hashes(np.array(TOKENS, np.uint32), 16)
    index.register(OTHER)
    index.store(OTHER, Tier.DEVICE, namespace, hashes)
    IndexSnapshots(tmp_path / "index", index, source, interval_s=3600).save()
    restored = restore(tmp_path / "index", max_blocks=1000, expected_blocks=10)
    assert [each.config.holder for each in restored.positions] == [ENGINE]
    assert restored.index.max_blocks == 1000
    assert restored.index.stats().residencies_by_holder == {ENGINE: {Tier.DEVICE: 2}}
    assert restored.index.holder_id(OTHER) is None


@pytest.mark.parametrize("content", [None, b"something else"])
def test_without_a_good_file_it_is_empty(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "index"
    if content is not None:
        path.write_bytes(content)
    with capture_logs() as logs:
        restored = restore(path, max_blocks=7)
    assert (restored.positions, restored.index.stats().residencies, restored.index.max_blocks) == ((), 0, 7)
    assert [str(path) in each["reason"] for each in logs] == ([] if content is None else [True])
    assert restore(None).positions == ()


def registration(instance: str, **fields: object) -> Registration:
    known = {"endpoint": "tcp://e:1", "modelname": "m", "instance_id": instance, "block_size": 16}
    return Registration.model_validate(known | fields)


def test_registrations_are_kept(tmp_path: Path) -> None:
    store = FileStateStore(tmp_path)
    known = [registration("a", replay_endpoint="tcp://e:2", topic="kv"), registration("b", tenant_id="t")]
    RegistrationBook(store).save(known)
    found: list[Registration] = []
    book = RegistrationBook(store)

    def register(each: Registration) -> None:
        found.append(each)
        book.save(found)  # what it is told meanwhile is not the whole

    book.restore(register)
    assert found == known
    assert RegistrationBook(store)._read() == known
    book.save(found[:1])
    assert RegistrationBook(store)._read() == known[:1]


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b'[{"instance_id": "a"}]', b"\xff", b"3"])
def test_registrations_that_cannot_be_read_are_named_and_ignored(content: bytes) -> None:
    store = MemoryStateStore()
    store.put("index-registrations", content)
    with capture_logs() as logs:
        RegistrationBook(store).restore(lambda each: pytest.fail("nothing was registered"))
    assert [each["event"] for each in logs] == ["saved registrations are ignored; register again"]


def test_registrations_that_cannot_be_written_are_counted(tmp_path: Path) -> None:
    store = FileStateStore(tmp_path)
    (tmp_path / "index-registrations.unfinished").mkdir()
    book = RegistrationBook(store)
    with capture_logs() as logs:
        book.save([registration("a")])
    assert book.failures == 1
    assert [each["event"] for each in logs] == ["registrations cannot be saved"]
