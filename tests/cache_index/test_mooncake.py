"""Mooncake master events: recorded frames, what can be keyed, and streams over real sockets."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec
import numpy as np
import pytest
from plain_publisher import PlainPublisher
from recordings import frames_of, recorded_lines
from waiting import wait_for

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
from cache_index.mooncake import MooncakeEventSource, MooncakeStream
from cache_index.mooncake_events import decode_master_batch
from cache_index.mooncake_hints import MooncakeHints, name_of

POOL, ENGINE = Holder("pool-0"), Holder("engine")
BLOCK = 4
NAMESPACE = Namespace("tiny", BLOCK)
TOKENS = list(range(12))


def recorded_frames() -> list[list[bytes]]:
    return [frames_of(record) for record in recorded_lines("mooncake_master_frames.jsonl")]


def recorded_events() -> list[Any]:
    return [record["payload"] for record in recorded_lines("mooncake_master_events.jsonl")]


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
        ([1, {}], "events"),
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


def list_keys(pool: Pool, *keys: str, meanwhile: tuple[dict[str, Any], ...] = ()) -> None:
    """The master was asked and lists these keys; events come while it answers."""
    listing = pool.hints.begin_listing()
    present = {name for key in keys if (name := name_of(key)) is not None}
    pool.apply(*meanwhile)
    pool.hints.drop_unlisted([name for name in pool.hints.names() if name not in present], listing)
    pool.hints.learn_listed(present, listing)


def test_a_listing_drops_what_the_master_no_longer_has() -> None:
    pool = Pool()
    pool.explain([101, 102], TOKENS[:8])
    pool.apply(as_sent(1, "stored", 101), as_sent(2, "stored", 102), as_sent(3, "stored", 9))
    list_keys(pool, "101", "session/7")
    assert (pool.pooled(), pool.hints.unkeyed, pool.hints.counters.unlisted) == (1, 0, 1)
    list_keys(pool, "0x65")
    assert (pool.pooled(), pool.hints.counters.unlisted) == (1, 1)


def test_a_listing_brings_what_no_event_told_of() -> None:
    pool = Pool()
    pool.explain([101, 102], TOKENS[:8])
    list_keys(pool, "101", "102", "77")
    assert (pool.pooled(), pool.hints.unkeyed, pool.hints.counters.learned) == (2, 1, 3)
    pool.explain([77], TOKENS[:4])  # the block itself is known by another name too
    list_keys(pool, "102", "77")
    assert (pool.pooled(), pool.hints.unkeyed, pool.hints.counters.learned) == (2, 0, 3)


def test_events_that_come_during_a_listing_know_better() -> None:
    pool = Pool()
    pool.explain([101, 102, 103], TOKENS)
    pool.apply(as_sent(1, "stored", 101), as_sent(2, "stored", 102))
    list_keys(pool, "101", "102", meanwhile=(as_sent(3, "removed", 102), as_sent(4, "stored", 103)))
    assert pool.hints.names() == [101, 103]


def test_a_listing_from_before_the_hints_were_voided_says_nothing() -> None:
    pool = Pool()
    pool.explain([101, 102], TOKENS[:8])
    pool.apply(as_sent(1, "stored", 101))
    list_keys(pool, "102", meanwhile=(as_sent(2, "cleared"), as_sent(3, "stored", 101)))
    assert pool.hints.names() == [101]


# --- over sockets --------------------------------------------------------------------------------------


class Master(PlainPublisher):
    """A publisher as the master has it: no topic, sequences from 1, no replay."""

    sequence = 0

    def publish(self, *events: dict[str, Any]) -> None:
        self.send(msgspec.msgpack.encode([1000, list(events), 0]))

    def send(self, payload: bytes) -> None:
        self.sequence += 1
        self.send_frames(b"", self.sequence.to_bytes(8, "big"), payload)


class Setup:
    def __init__(self) -> None:
        self.pool = Pool()
        self.pool.explain([101, 102, 103], TOKENS)
        self.source = MooncakeEventSource(self.pool.index)
        self.source.start()
        self.master = Master()
        self.source.add_stream(self.stream())
        self.master.wait_for_subscriber()

    def stream(self) -> StreamConfig:
        return StreamConfig(POOL, "tiny", self.master.endpoint, None, block_size=BLOCK)

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
    assert stats.state == "cold"  # nobody knows what the first message said


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


# --- listings over HTTP ----------------------------------------------------------------------------------


class Admin:
    """A master's admin port, as far as it is asked: keys as text, one a line."""

    def __init__(self, *keys: str, events_enabled: bool = True) -> None:
        self.keys = list(keys)
        self.asked: list[str] = []
        self.status = 200
        self.held = threading.Event()
        self.held.set()
        admin = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                admin.asked.append(self.path)
                content = json.dumps({"enabled": events_enabled, "published_events": 3})
                if self.path == "/get_all_keys":
                    content = "".join(f"{key}\n" for key in admin.keys)
                    admin.held.wait(20)
                self.send_response(admin.status)
                self.end_headers()
                self.wfile.write(content.encode())

            def log_message(self, *_: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    @property
    def listings(self) -> int:
        return self.asked.count("/get_all_keys")

    def close(self) -> None:
        self.held.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def admin() -> Iterator[Admin]:
    made = Admin()
    yield made
    made.close()


def follow(setup: Setup, admin: Admin, reconcile_s: float = 1.0) -> None:
    """Follow the master anew, this time with its admin port."""
    setup.source.remove_stream(POOL)
    setup.master.wait_until_left()
    setup.source.add_stream(MooncakeStream.of(setup.stream(), admin.url, reconcile_s))
    setup.master.wait_for_subscriber()


def test_what_a_master_had_before_is_learned_from_its_keys(setup: Setup, admin: Admin) -> None:
    admin.keys = ["101", "0x66", "tenant/7", "session-1"]
    follow(setup, admin)
    wait_for(lambda: setup.pool.pooled() == 2)
    wait_for(lambda: setup.stats().state == "warm")
    setup.master.sequence = 40
    setup.master.publish(as_sent(41, "stored", 103))
    wait_for(lambda: setup.pool.pooled() == 3)
    assert setup.stats().state == "warm"


def test_removals_that_nobody_told_of_are_found(setup: Setup, admin: Admin) -> None:
    admin.keys = ["101", "102"]
    follow(setup, admin)
    wait_for(lambda: setup.pool.pooled() == 2)
    admin.keys = ["101"]  # batch removals publish nothing
    wait_for(lambda: setup.pool.pooled() == 1)
    assert setup.source.hint_counters(POOL).unlisted == 1


def test_a_gap_is_closed_by_the_next_listing(setup: Setup, admin: Admin) -> None:
    admin.keys = ["101", "102"]
    follow(setup, admin, reconcile_s=3600.0)
    wait_for(lambda: setup.stats().state == "warm" and setup.pool.pooled() == 2)
    setup.master.publish(as_sent(1, "stored", 9))
    wait_for(lambda: setup.stats().last_seq == 1)
    setup.master.sequence += 3
    admin.held.clear()
    setup.master.publish(as_sent(5, "stored", 9))
    wait_for(lambda: setup.stats().state == "cold")
    admin.held.set()
    wait_for(lambda: setup.stats().state == "warm" and setup.pool.pooled() == 2)
    assert setup.stats().gaps == 1


def test_an_admin_port_that_fails_changes_nothing(setup: Setup, admin: Admin) -> None:
    admin.status = 500
    follow(setup, admin)
    setup.master.publish(as_sent(1, "stored", 101))
    wait_for(lambda: setup.pool.pooled() == 1)
    asked = admin.listings
    wait_for(lambda: admin.listings >= asked + 2)
    assert (setup.pool.pooled(), setup.stats().state) == (1, "warm")


def test_a_removed_pool_is_not_listed_any_more(setup: Setup, admin: Admin) -> None:
    admin.keys = ["101"]
    admin.held.clear()
    follow(setup, admin)
    wait_for(lambda: admin.listings == 1)
    setup.source.remove_stream(POOL)
    admin.held.set()
    wait_for(lambda: "/kv_events/status" in admin.asked)
    other = Admin()  # its listing comes after the removed pool's has been dealt with
    try:
        stream = StreamConfig(Holder("other"), "tiny", setup.master.endpoint, None, block_size=BLOCK)
        setup.source.add_stream(MooncakeStream.of(stream, other.url, 1.0))
        wait_for(lambda: other.listings >= 2)
    finally:
        other.close()
    assert (setup.pool.pooled(), admin.listings) == (0, 1)


def test_recorded_objects_are_listed_as_the_master_names_them(setup: Setup, admin: Admin) -> None:
    events = [event for payload in recorded_events() for event in payload[1]]
    present = {event["object_key"] for event in events if event["event_type"] == "stored"}
    present -= {event["object_key"] for event in events if event["event_type"] == "removed"}
    admin.keys = sorted(present)
    names = {event["seq_hashes"][0] for event in events if event["object_key"] in present}
    setup.pool.explain(sorted(names)[:3], TOKENS)
    follow(setup, admin)
    wait_for(lambda: setup.pool.pooled() == 3)
    assert setup.source.hint_counters(POOL).learned == len(names) == len(present)
