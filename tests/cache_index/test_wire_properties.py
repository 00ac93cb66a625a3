"""The compiled reader means the same as the readable decoder, on any events, damaged ones and noise."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from wire_twins import KNOWN, as_array, batch, check_same

pytestmark = pytest.mark.usefixtures("swept_between_groups")

HASHES = [1, 2, 3, 2**63 + 7, 2**64 - 1, -1, -(2**62), b"d" * 32, b"e" * 16, bytes(range(8)), 200, 70_000]
MEDIA = ["GPU", "gpu", "cpu", "CPU_PINNED", "CPU_TIER1", "DISK", "EXTERNAL", None, None, None]
SALTS = ["", "a", "tenant", "longer than eight"]
GROUPS = [None, None, 0, 0, 1, 2]
KINDS = [None, "full_attention", "full_attention", "mla_attention", "sliding_window", "mamba", "unheard_of"]

hashes = st.sampled_from(HASHES)
tokens = st.sampled_from([0, 5, 127, 128, 255, 256, 65_535, 65_536, 150_000, 2**32 - 1])
junk = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=4)
    | st.binary(max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=6,
)
keys = st.none() | st.lists(st.sampled_from(["sql", "salt", "tenant", "größe", 5, ["image", 1]]), max_size=2)


@st.composite
def stored_events(draw: st.DrawFn) -> dict[str, Any]:
    names = draw(st.lists(hashes, min_size=1, max_size=4))
    block_size = draw(st.sampled_from([1, 2, 2, 2, 16, 61]))
    pattern = draw(st.lists(tokens, min_size=1, max_size=4))
    count = len(names) * block_size
    event: dict[str, Any] = {
        "type": "BlockStored",
        "block_hashes": names,
        "parent_block_hash": draw(st.none() | hashes),
        "token_ids": (pattern * count)[:count],
        "block_size": block_size,
        "medium": draw(st.sampled_from(MEDIA)),
    }
    if draw(st.booleans()):
        event["lora_name"] = draw(st.sampled_from([None, None, "sql", "other", "größe"]))
        event["lora_id"] = draw(st.sampled_from([None, None, 1]))
        event["extra_keys"] = draw(st.none() | st.lists(keys, min_size=len(names), max_size=len(names)))
    if draw(st.booleans()):
        event["cache_salt"] = draw(st.sampled_from(SALTS))
    if draw(st.booleans()):
        event["group_idx"] = draw(st.sampled_from(GROUPS))
        event["kv_cache_spec_kind"] = draw(st.sampled_from(KINDS))
    return event


removed_events = st.builds(
    lambda names, medium, group: {
        "type": "BlockRemoved",
        "block_hashes": names,
        "medium": medium,
        "group_idx": group,
    },
    st.lists(hashes, max_size=4),
    st.sampled_from(MEDIA),
    st.sampled_from(GROUPS),
)
cleared_events = st.builds(
    lambda medium: {"type": "AllBlocksCleared", "medium": medium}, st.sampled_from(MEDIA)
)


@st.composite
def events(draw: st.DrawFn) -> Any:
    event = draw(st.one_of(stored_events(), stored_events(), removed_events, removed_events, cleared_events))
    if draw(st.integers(0, 3)) == 0:
        return as_array(event)
    disturbance = draw(st.integers(0, 9))
    if disturbance == 0:
        event["field_of_the_future"] = draw(junk)
    elif disturbance == 1:
        event[draw(st.sampled_from(list(event)))] = draw(junk)
    elif disturbance == 2:
        event.pop(draw(st.sampled_from(list(event))))
    elif disturbance == 3:
        event = dict(draw(st.permutations(list(event.items()))))
    elif disturbance == 4:
        return draw(st.sampled_from([{"type": "BlockPinned", "block_hashes": [1]}, ["BlockMoved", 1]]))
    return event


payload_lists = st.lists(
    st.builds(lambda inner: batch(*inner), st.lists(events(), max_size=5)), min_size=1, max_size=8
)
relaxed = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


@relaxed
@given(payload_lists, st.integers(1, 4), st.sampled_from([None, None, 2]))
def test_any_events_give_the_same(payloads: list[bytes], group: int, block_size: int | None) -> None:
    check_same(payloads, group, block_size)


def damaged(payload: bytes, chance: random.Random) -> bytes:
    """A few bytes changed, removed, doubled, or the end cut off."""
    data = bytearray(payload)
    for _ in range(chance.randint(1, 3)):
        if not data:
            break
        at = chance.randrange(len(data))
        kind = chance.randrange(5)
        if kind == 0:
            data[at] = chance.randrange(256)
        elif kind == 1:
            data[at] ^= 1 << chance.randrange(8)
        elif kind == 2:
            del data[at : at + chance.randint(1, 8)]
        elif kind == 3:
            data[at:at] = data[at : at + chance.randint(1, 8)]
        else:
            del data[at:]
    return bytes(data)


@relaxed
@given(payload_lists, st.integers(0, 2**32), st.integers(1, 4))
def test_damaged_payloads_give_the_same(payloads: list[bytes], seed: int, group: int) -> None:
    """No exception, nothing read behind an end, and the index is that of the events that counted."""
    chance = random.Random(seed)
    mixed = [
        each for payload in payloads for each in (damaged(payload, chance), payload, damaged(payload, chance))
    ]
    check_same(mixed, group)


@relaxed
@given(st.lists(st.binary(max_size=60), max_size=4))
def test_noise_gives_the_same(payloads: list[bytes]) -> None:
    check_same([KNOWN, *payloads, *(b"\x92\x01" + payload for payload in payloads)], group=3)
