"""Mooncake master events: recorded frames, what can be keyed, and streams over real sockets."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from cache_index import (
    CacheIndex,
    Holder,
    MalformedEventError,
    Namespace,
    StreamConfig,
    StreamIngest,
    StreamStats,
    Tier,
    decode_batch,
    sequence_hashes,
)
from cache_index.cache_events import CacheEvent
from cache_index.mooncake import MooncakeEventSource
from cache_index.mooncake_events import decode_master_batch
from cache_index.mooncake_hints import MooncakeHints

FIXTURES = Path(__file__).parents[2].parent / "shared" / "fixtures"
POOL, ENGINE = Holder("pool-0"), Holder("engine")
BLOCK = 4
NAMESPACE = Namespace("tiny", BLOCK)
TOKENS = list(range(12))


def recorded_frames() -> list[list[bytes]]:
    path = FIXTURES / "mooncake_master_frames.jsonl"
    if not path.exists():
        pytest.skip("no recorded frames")
    records = map(json.loads, path.read_text().splitlines())
    return [[bytes.fromhex(frame) for frame in record["frames_hex"]] for record in records]


def recorded_events() -> list[list[Any]]:
    path = FIXTURES / "mooncake_master_events.jsonl"
    if not path.exists():
        pytest.skip("no recorded events")
    return [json.loads(line)["payload"] for line in path.read_text().splitlines()]


def as_sent(event_id: int, kind: str, *names: int, **fields: Any) -> dict[str, Any]:
    """An envelope as the master fills it in."""
    return {
        "event_id": event_id,
        "timestamp": 1795209162913,
        "event_type": kind,
        "model_name": None,
        "block_size": None,
        "additional_salt": None,
        "lora_name": None,
        "tenant_id": "default",
        "backend_id": "pool-0",
        "group_id": None,
        "medium": "cpu",
        "dp_rank": None,
        "seq_hashes": list(names),
        "base_block_idx": 0,
        "parent_hash": None,
        "token_ids": None,
        **fields,
    }


def decoded(*events: dict[str, Any]) -> list[CacheEvent]:
    batch = decode_master_batch(msgspec.msgpack.encode([1000, list(events), 0]))
    assert batch.rejected == ()
    return list(batch.events)


def test_every_recorded_frame_is_read() -> None:
    batches = [decode_master_batch(frames[-1]) for frames in recorded_frames()]
    events = [event for batch in batches for event in batch.events]
    assert [event.event_id for event in events] == list(range(1, 75))
    assert {event.kind for event in events} == {"stored", "removed"}
    assert {(e.backend_id, e.tenant, e.tier, e.model, e.token_ids) for e in events} == {
        ("pool-0", "default", Tier.HOST, None, None)
    }
    assert all(not batch.rejected and not batch.unknown_events for batch in batches)


def test_recorded_events_read_as_their_decoded_form() -> None:
    for payload in recorded_events():
        batch = decode_master_batch(msgspec.msgpack.encode(payload))
        assert batch.timestamp_s == payload[0] / 1000
        assert [(e.event_id, e.kind, list(e.names)) for e in batch.events] == [
            (e["event_id"], e["event_type"], e["seq_hashes"]) for e in payload[1]
        ]


def test_recorded_objects_cannot_be_keyed_and_are_counted() -> None:
    index = CacheIndex()
    index.register(POOL)
    hints = MooncakeHints(index, POOL, "tiny", BLOCK)
    present: set[int] = set()
    for frames in recorded_frames():
        for event in decode_master_batch(frames[-1]).events:
            hints.apply(event)
            change = present.update if event.kind == "stored" else present.difference_update
            change(event.names)
    assert (hints.counters.keyed, hints.counters.unresolved) == (0, 0)
    assert (hints.counters.unkeyed, hints.unkeyed) == (49, len(present))
    assert index.stats().blocks == 0


@pytest.mark.parametrize(
    ("payload", "field"),
    [
        (b"\xc1", "payload"),
        ({}, "payload"),
        ([1], "payload"),
        ([1, {}], "payload"),
        (["x", []], "timestamp"),
    ],
)
def test_a_payload_that_is_no_batch(payload: Any, field: str) -> None:
    with pytest.raises(MalformedEventError) as caught:
        decode_master_batch(payload if isinstance(payload, bytes) else msgspec.msgpack.encode(payload))
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"event_id": None}, "event_id"),
        ({"backend_id": 5}, "backend_id"),
        ({"medium": "papyrus"}, "medium"),
        ({"seq_hashes": None}, "seq_hashes"),
        ({"seq_hashes": ["1"]}, "seq_hashes"),
        ({"token_ids": [-1]}, "token_ids"),
        ({"block_size": "4"}, "block_size"),
    ],
)
def test_a_broken_event_is_set_aside_with_its_field(change: dict[str, Any], field: str) -> None:
    events = [{**as_sent(1, "stored", 1), **change}, as_sent(2, "stored", 2), as_sent(3, "lost"), 7]
    batch = decode_master_batch(msgspec.msgpack.encode([1000, events, 0]))
    assert [error.field for error in batch.rejected] == [field, "event"]
    assert (len(batch.events), batch.unknown_events) == (1, 1)


class Pool:
    """Hints beside an engine that explains object hashes."""

    def __init__(self, **options: Any) -> None:
        self.index = CacheIndex()
        self.index.register(POOL)
        self.index.register(ENGINE)
        self.hints = MooncakeHints(self.index, POOL, "tiny", BLOCK, **options)
        self._engine = StreamIngest(self.index, ENGINE, "tiny")

    def apply(self, *events: dict[str, Any]) -> None:
        for event in decoded(*events):
            self.hints.apply(event)

    def explain(self, names: list[int], tokens: list[int]) -> None:
        event = {"type": "BlockStored", "block_hashes": names, "parent_block_hash": None}
        event |= {"token_ids": tokens, "block_size": BLOCK, "medium": "GPU"}
        self._engine.apply(decode_batch(msgspec.msgpack.encode([0.0, [event], 0])))

    def evict(self, *names: int) -> None:
        events = [{"type": "BlockRemoved", "block_hashes": [name], "medium": "GPU"} for name in names]
        self._engine.apply(decode_batch(msgspec.msgpack.encode([0.0, events, 0])))

    def pooled(self, tokens: list[int] = TOKENS) -> int:
        row = self.index.holder_id(POOL)
        assert row is not None
        hashes = sequence_hashes(np.array(tokens, np.uint32), BLOCK)
        return int(self.index.match(NAMESPACE, hashes)[row, Tier.REMOTE])


def test_an_object_is_the_block_that_an_engine_stored_under_its_hash() -> None:
    pool = Pool()
    pool.explain([101, 102, 103], TOKENS)
    pool.apply(as_sent(1, "stored", 101), as_sent(2, "stored", 102))
    assert pool.pooled() == 2
    pool.evict(103, 102, 101)
    assert pool.pooled() == 2  # the pool has them still
    pool.apply(as_sent(3, "removed", 102))
    assert pool.pooled() == 1


def test_an_object_may_be_told_before_the_engine_explains_it() -> None:
    pool = Pool()
    pool.apply(as_sent(1, "stored", 101))
    assert (pool.pooled(), pool.hints.unkeyed) == (0, 1)
    pool.explain([101], TOKENS[:4])
    pool.apply(as_sent(2, "stored", 999))
    assert (pool.pooled(), pool.hints.unkeyed) == (1, 1)


def test_tokens_key_an_object_by_themselves() -> None:
    pool = Pool()
    pool.apply(as_sent(1, "stored", 1, token_ids=TOKENS[:4], block_size=BLOCK))
    pool.apply(as_sent(2, "stored", 2, token_ids=TOKENS[4:8], parent_hash=1, base_block_idx=1))
    assert pool.pooled() == 2
    pool.apply(as_sent(3, "stored", 3, token_ids=TOKENS[8:], base_block_idx=2))
    pool.apply(as_sent(4, "stored", 4, token_ids=TOKENS[:3]))
    pool.apply(as_sent(5, "stored", 5, token_ids=TOKENS[8:], parent_hash=77))
    pool.apply(as_sent(6, "stored", 6, token_ids=TOKENS[:4], additional_salt="s"))
    pool.apply(as_sent(7, "stored", 7, model_name="other"))
    assert (pool.pooled(), pool.hints.counters.unkeyed) == (2, 4)


def test_a_repeated_object_is_one() -> None:
    pool = Pool()
    pool.explain([101], TOKENS[:4])
    pool.apply(as_sent(1, "stored", 101), as_sent(2, "stored", 101), as_sent(3, "removed", 101))
    assert pool.pooled() == 0
    pool.apply(as_sent(4, "removed", 101))
    assert pool.hints.counters.unresolved == 1


def test_cleared_voids_the_pool_only() -> None:
    pool = Pool()
    pool.explain([101], TOKENS[:4])
    pool.apply(as_sent(1, "stored", 101), as_sent(2, "stored", 5), as_sent(3, "cleared"))
    assert (pool.pooled(), pool.hints.unkeyed) == (0, 0)
    assert len(pool.index.residencies(ENGINE)) == 1


def test_the_oldest_hints_go_when_there_are_too_many() -> None:
    pool = Pool(max_blocks=2)
    pool.explain([101, 102, 103], TOKENS)
    pool.apply(*(as_sent(i, "stored", 100 + i) for i in (1, 2, 3)))
    assert len(pool.hints) == 2
    assert pool.pooled() == 0
    pool.apply(*(as_sent(i, "stored", i) for i in (11, 12, 13, 14)))
    assert (pool.hints.unkeyed, pool.hints.counters.forgotten) == (2, 3)


def test_reconciling_drops_what_the_master_no_longer_lists() -> None:
    pool = Pool()
    pool.explain([101, 102], TOKENS[:8])
    pool.apply(as_sent(1, "stored", 101), as_sent(2, "stored", 102), as_sent(3, "stored", 9))
    assert pool.hints.reconcile(["101", "session/7"]) == 1
    assert (pool.pooled(), pool.hints.unkeyed) == (1, 0)
    assert pool.hints.reconcile(["0x65"]) == 0


# --- over sockets --------------------------------------------------------------------------------------


def wait_for(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline_s, "did not happen in time"
        time.sleep(0.005)


class Master:
    """A publisher as the master has it: no topic, sequences from 1, no replay."""

    def __init__(self, endpoint: str = "tcp://127.0.0.1:*") -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.XPUB)
        self._socket.setsockopt(zmq.LINGER, 0)
        wait_for(lambda: self._bound(endpoint))
        self.endpoint = self._socket.getsockopt(zmq.LAST_ENDPOINT).decode()
        self.sequence = 0

    def _bound(self, endpoint: str) -> bool:
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError:
            return False
        return True

    def wait_for_subscriber(self) -> None:
        assert self._socket.poll(20_000)
        self._socket.recv()

    def publish(self, *events: dict[str, Any]) -> None:
        self.send(msgspec.msgpack.encode([1000, list(events), 0]))

    def send(self, payload: bytes) -> None:
        self.sequence += 1
        self._socket.send_multipart([b"", self.sequence.to_bytes(8, "big"), payload])

    def close(self) -> None:
        self._context.destroy(0)


class Setup:
    def __init__(self) -> None:
        self.pool = Pool()
        self.pool.explain([101, 102, 103], TOKENS)
        self.source = MooncakeEventSource(self.pool.index)
        self.source.start()
        self.master = Master()
        self.source.add_stream(StreamConfig(POOL, "tiny", self.master.endpoint, None, block_size=BLOCK))
        self.master.wait_for_subscriber()

    def stats(self) -> StreamStats:
        return self.source.stream_stats()[0]

    def close(self) -> None:
        self.source.close()
        self.master.close()


@pytest.fixture
def setup() -> Iterator[Setup]:
    made = Setup()
    yield made
    made.close()


def test_a_master_is_followed(setup: Setup) -> None:
    setup.master.publish(as_sent(1, "stored", 101), as_sent(2, "stored", 55))
    wait_for(lambda: setup.pool.pooled() == 1)
    stats = setup.stats()
    assert (stats.state, stats.last_seq, stats.events, stats.unresolved_blocks) == ("warm", 1, 2, 1)
    assert setup.source.hint_counters(POOL).keyed == 1
    assert setup.source.reconcile(POOL, ["55"]) == 1
    assert setup.pool.pooled() == 0


def test_recorded_frames_through_a_socket(setup: Setup) -> None:
    for frames in recorded_frames():
        setup.master.send(frames[-1])
    wait_for(lambda: setup.stats().batches == 60)
    assert (setup.stats().events, setup.stats().malformed_events) == (74, 0)


def test_a_gap_voids_the_hints(setup: Setup) -> None:
    setup.master.publish(as_sent(1, "stored", 101))
    wait_for(lambda: setup.pool.pooled() == 1)
    setup.master.sequence += 1
    setup.master.publish(as_sent(3, "stored", 102))
    wait_for(lambda: setup.stats().last_seq == 3)
    assert setup.pool.pooled() == 0
    assert (setup.stats().state, setup.stats().gaps) == ("cold", 1)


def test_bad_payloads_are_counted_and_the_stream_goes_on(setup: Setup) -> None:
    setup.master.send(b"\xc1")
    setup.master.publish(as_sent(1, "stored", 101), {"event_type": "stored"}, as_sent(2, "sung"))
    wait_for(lambda: setup.pool.pooled() == 1)
    stats = setup.stats()
    assert (stats.malformed_frames, stats.malformed_events, stats.unknown_events) == (1, 1, 1)


def test_a_restarted_master_leaves_nothing_stale(setup: Setup) -> None:
    setup.master.publish(as_sent(1, "stored", 101))
    wait_for(lambda: setup.pool.pooled() == 1)
    setup.master.close()
    wait_for(lambda: setup.stats().state == "connecting")
    setup.master = Master(setup.master.endpoint)
    setup.master.wait_for_subscriber()
    wait_for(lambda: setup.pool.pooled() == 0)
    setup.master.publish(as_sent(1, "stored", 101))
    wait_for(lambda: setup.pool.pooled() == 1)
    assert setup.stats().state == "warm"


def test_resync_and_removal_forget(setup: Setup) -> None:
    setup.master.publish(as_sent(1, "stored", 101))
    wait_for(lambda: setup.pool.pooled() == 1)
    setup.source.resync(POOL)
    assert setup.pool.pooled() == 0
    setup.master.publish(as_sent(2, "stored", 101))
    wait_for(lambda: setup.pool.pooled() == 1)
    setup.source.remove_stream(POOL)
    assert (setup.pool.pooled(), setup.source.stream_stats()) == (0, [])
