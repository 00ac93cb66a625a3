"""The decoder: every shape that engines send, and every way in which it can be wrong."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_index import BlocksCleared, BlocksRemoved, BlocksStored, MalformedEventError, Tier, decode_batch

DIGEST = bytes(range(32))
STORED: dict[str, Any] = {
    "type": "BlockStored",
    "block_hashes": [11, 12],
    "parent_block_hash": 10,
    "token_ids": [1, 2, 3, 4],
    "block_size": 2,
    "lora_id": None,
    "medium": "GPU",
    "lora_name": None,
    "extra_keys": None,
}


def encode(*events: Any, rank: int | None = 0) -> bytes:
    return msgspec.msgpack.encode([1.5, list(events), rank])


def decode_one(event: Any) -> Any:
    batch = decode_batch(encode(event))
    if batch.rejected:
        raise batch.rejected[0]
    return batch.events[0]


def stored(**changes: Any) -> BlocksStored:
    event: BlocksStored = decode_one({**STORED, **changes})
    return event


def same(left: BlocksStored, right: BlocksStored) -> bool:
    return (
        left.engine_hashes.tolist() == right.engine_hashes.tolist()
        and left.token_ids.tolist() == right.token_ids.tolist()
        and (left.parent_engine_hash, left.block_size, left.tier, left.lora, left.extra_keys)
        == (right.parent_engine_hash, right.block_size, right.tier, right.lora, right.extra_keys)
    )


def test_a_stored_event() -> None:
    event = stored()
    assert event.engine_hashes.tolist() == [11, 12]
    assert event.engine_hashes.dtype == np.uint64
    assert event.token_ids.tolist() == [1, 2, 3, 4]
    assert event.token_ids.dtype == np.uint32
    assert (event.parent_engine_hash, event.block_size, event.tier, event.lora) == (10, 2, Tier.DEVICE, None)


def test_the_batch_around_events() -> None:
    batch = decode_batch(encode(STORED, {"type": "AllBlocksCleared"}, rank=3))
    assert (batch.timestamp_s, batch.rank, len(batch.events), batch.unknown_events) == (1.5, 3, 2, 0)
    assert decode_batch(msgspec.msgpack.encode([1, []])).rank is None
    assert decode_batch(msgspec.msgpack.encode([1, [], None, "more"])).events == ()


def test_arrays_mean_the_same_as_maps() -> None:
    as_array = list(STORED.values())
    assert same(decode_one(as_array), stored())
    assert same(decode_one([*as_array, 0, "full_attention", {"new": 1}]), stored())
    assert same(decode_one(as_array[:6]), stored())
    removed = decode_one(["BlockRemoved", [1], "CPU"])
    assert (removed.engine_hashes.tolist(), removed.tier) == ([1], Tier.HOST)
    assert decode_one(["AllBlocksCleared"]) == BlocksCleared(None)


def test_hashes_of_every_kind() -> None:
    low = int.from_bytes(DIGEST[-8:], "big")
    event = stored(block_hashes=[DIGEST, DIGEST[:16]], parent_block_hash=DIGEST)
    assert event.engine_hashes.tolist() == [low, int.from_bytes(DIGEST[8:16], "big")]
    assert event.parent_engine_hash == low
    event = stored(block_hashes=[-1, 5], parent_block_hash=-2)
    assert event.engine_hashes.tolist() == [2**64 - 1, 5]
    assert event.parent_engine_hash == 2**64 - 2
    assert stored(block_hashes=[2**64 - 1, 2**63]).engine_hashes.tolist() == [2**64 - 1, 2**63]


@pytest.mark.parametrize(
    ("medium", "tier"),
    [("GPU", 0), ("gpu", 0), ("cpu", 1), ("CPU_PINNED", 1), ("Disk", 2), ("EXTERNAL", 4), (None, 0)],
)
def test_media(medium: str | None, tier: int) -> None:
    assert stored(medium=medium).tier == tier


def test_a_removal_without_medium_means_the_device_and_a_clear_everything() -> None:
    removed = decode_one({"type": "BlockRemoved", "block_hashes": [1]})
    assert isinstance(removed, BlocksRemoved)
    assert removed.tier == Tier.DEVICE
    assert decode_one({"type": "AllBlocksCleared"}) == BlocksCleared(None)
    assert decode_one({"type": "AllBlocksCleared", "medium": "cpu"}) == BlocksCleared(Tier.HOST)


def test_adapters() -> None:
    assert stored(lora_name="adapter", lora_id=1).lora == "adapter"
    assert stored(lora_id=7).lora == "id:7"


def test_extra_keys_lose_the_adapter_only() -> None:
    event = stored(extra_keys=[["adapter", "salt"], ["adapter"]], lora_name="adapter", lora_id=1)
    assert event.extra_keys == (("salt",), ())
    assert stored(extra_keys=[["salt"], None]).extra_keys == (("salt",), ())
    assert stored(extra_keys=[None, None]).extra_keys is None
    assert stored(extra_keys=[[["image", 0]], None]).extra_keys == ((["image", 0],), ())
    assert stored(extra_keys=[[7, "salt"], [7]], lora_id=7).extra_keys == (("salt",), ())


def test_what_is_not_known_is_counted() -> None:
    batch = decode_batch(encode({**STORED, "new_field": [1]}, {"type": "BlockPinned"}, ["BlockMoved", 1]))
    assert (len(batch.events), batch.unknown_events, batch.rejected) == (1, 2, ())


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("block_hashes", {"block_hashes": None}),
        ("block_hashes", {"block_hashes": ["x", "y"]}),
        ("block_hashes", {"block_hashes": [b"short", 1]}),
        ("block_hashes", {"block_hashes": [-(2**63) + 1, 1.5]}),
        ("parent_block_hash", {"parent_block_hash": "x"}),
        ("parent_block_hash", {"parent_block_hash": True}),
        ("token_ids", {"token_ids": None}),
        ("token_ids", {"token_ids": [1, 2, 3, -4]}),
        ("token_ids", {"token_ids": [1, 2, 3, 2**32]}),
        ("token_ids", {"token_ids": [1, 2, 3, "x"]}),
        ("block_size", {"block_size": 3}),
        ("block_size", {"block_size": 0}),
        ("block_size", {"block_size": None}),
        ("block_size", {"token_ids": [1]}),
        ("medium", {"medium": "TAPE"}),
        ("medium", {"medium": 3}),
        ("lora_name", {"lora_name": 3}),
        ("extra_keys", {"extra_keys": [None]}),
        ("extra_keys", {"extra_keys": ["x", "y"]}),
        ("type", {"type": 3}),
    ],
)
def test_a_bad_event_names_its_field_and_spares_the_others(field: str, changes: dict[str, Any]) -> None:
    batch = decode_batch(encode(STORED, {**STORED, **changes}, {"type": "BlockRemoved", "block_hashes": [1]}))
    assert len(batch.events) == 2
    assert [error.field for error in batch.rejected] == [field]


@pytest.mark.parametrize(
    ("field", "payload"),
    [
        ("payload", b""),
        ("payload", b"\xc1"),
        ("payload", encode(STORED)[:-20]),
        ("payload", msgspec.msgpack.encode({"ts": 1})),
        ("payload", msgspec.msgpack.encode([1.5])),
        ("timestamp", msgspec.msgpack.encode(["now", [], 0])),
        ("events", msgspec.msgpack.encode([1.5, {}, 0])),
        ("data_parallel_rank", msgspec.msgpack.encode([1.5, [], "x"])),
    ],
)
def test_a_bad_payload_is_one_precise_error(field: str, payload: bytes) -> None:
    with pytest.raises(MalformedEventError) as caught:
        decode_batch(payload)
    assert caught.value.field == field
    assert str(caught.value).startswith(f"{field}: ")


@pytest.mark.parametrize("event", [3, [], None, "BlockStored"])
def test_an_event_that_is_none(event: Any) -> None:
    assert [error.field for error in decode_batch(encode(event)).rejected] == ["event"]


@given(st.binary(max_size=200))
def test_noise_raises_nothing_else(payload: bytes) -> None:
    with suppress(MalformedEventError):
        decode_batch(payload)


json = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.text(max_size=5)
    | st.binary(max_size=40),
    lambda inner: st.lists(inner, max_size=4),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(list(STORED)[1:]), json))
def test_any_field_may_be_anything(changes: dict[str, Any]) -> None:
    batch = decode_batch(encode({**STORED, **changes}))
    assert len(batch.events) + len(batch.rejected) == 1
