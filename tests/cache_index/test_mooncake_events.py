"""Events of Mooncake masters: recorded frames, and what is wrong with others."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from mooncake_pool import as_sent, recorded_events, recorded_frames

from cache_index import MalformedEventError, Tier
from cache_index.mooncake_events import decode_master_batch


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
