"""The compiled reader means the same as the readable decoder, on whatever bytes it gets."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from wire_twins import (
    HOLDER,
    KNOWN,
    Stream,
    as_array,
    batch,
    check_same,
    removed,
    stored,
)

from cache_index import (
    CacheIndex,
    Holder,
    IngestCounters,
    KernelError,
    Namespace,
    StreamIngest,
    UnknownHolderError,
    decode_batch,
    ingest,
    self_check,
    sequence_hashes,
    slots,
    warm,
    wire,
    wire_kernels,
)

pytestmark = pytest.mark.usefixtures("swept_between_groups")
FIXTURES = Path(__file__).parents[2].parent / "shared" / "fixtures"


@pytest.fixture
def left_over(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The payloads that the compiled reader leaves to the readable decoder."""
    payloads: list[bytes] = []

    def decode(payload: bytes) -> Any:
        payloads.append(payload)
        return decode_batch(payload)

    monkeypatch.setattr(ingest, "decode_batch", decode)
    return payloads


def recorded(name: str) -> dict[str, list[bytes]]:
    """Payloads per recorded stream."""
    path = FIXTURES / name
    if not path.exists():
        pytest.skip("no recorded frames")
    streams: dict[str, list[bytes]] = {}
    for line in path.read_text().splitlines():
        record = json.loads(line)
        streams.setdefault(record["label"], []).append(bytes.fromhex(record["frames_hex"][-1]))
    return streams


# --- recorded streams --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["vllm_kv_events.jsonl", "sglang_kv_events.jsonl"])
@pytest.mark.parametrize("group", [1, 3, 1000])
def test_recorded_streams_give_the_same(name: str, group: int) -> None:
    for payloads in recorded(name).values():
        check_same(payloads, group)
        check_same(payloads, group, block_size=32)


def test_recorded_streams_are_read_compiled(left_over: list[bytes]) -> None:
    streams = recorded("vllm_kv_events.jsonl") | recorded("sglang_kv_events.jsonl")
    for label, payloads in streams.items():
        left_over.clear()
        stream = Stream(compiled=True)
        stream.apply(payloads)
        decoded = [decode_batch(payload) for payload in left_over] if label != "SG_load" else []
        namespaces = {
            (event.block_size, event.lora)
            for each in decoded
            for event in each.events
            if hasattr(event, "block_size")
        }
        # the first payload of each namespace makes it known; none of the others is left over
        assert len(left_over) <= (len(payloads) if label == "SG_load" else len(namespaces)), label


def test_salted_prompts_of_sglang_are_told_apart() -> None:
    """Two tenants' salts and the same tokens: no residency in common, also where the hashes say so."""
    payloads = recorded("sglang_kv_events.jsonl")["SG_salt"]
    stream = check_same(payloads)
    blocks = sum(
        len(event["block_hashes"]) for payload in payloads for event in msgspec.msgpack.decode(payload)[1]
    )
    assert len(stream.index.residencies(HOLDER)) == blocks


# --- single forms ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "event",
    [
        stored([1, 2], range(8)),
        stored([2**64 - 1, 2**63, -1, -(2**63), -5, 127, 128, 255, 256, 2**16, 2**32], range(44)),
        stored([bytes(range(32)), bytes(range(8))], range(8), parent=None),
        stored([b"x" * 300, 5], range(8)),
        stored([7], [0, 127, 128, 2**32 - 1]),
        stored([7], [255, 256, 65535, 65536], medium="cpu"),
        stored([7], range(4), medium="CPU_PINNED", lora_id=None, group_idx=3, extra_keys=[None]),
        stored([7], range(4), group_idx=1, kv_cache_spec_kind="mla_attention"),
        stored([7], range(4), group_idx=70_000, kv_cache_spec_kind="a kind of the future, with a long name"),
        stored([7], range(4), group_idx=0, kv_cache_spec_kind="sliding_window"),
        stored([7], range(5), group_idx=None, kv_cache_spec_kind="mamba", block_size=2),
        as_array(stored([7], range(4), group_idx=0, kv_cache_spec_kind="chunked_local_attention")),
        removed(900, group_idx=0),
        removed(900, group_idx=1),
        as_array(removed(900, group_idx=2)),
        removed(900, medium="GPU", group_idx=0, kv_cache_spec_kind="sliding_window_mla"),
        stored([7], range(4), medium="Disk", session_id="abc", numbers=[1, -1, 1.5, [[]], True, b"x"]),
        stored([7, 8], range(8), extra_keys=[["salt"], None]),
        stored([7, 8], range(8), extra_keys=[["a longer salt", "", "another"], ["s"]]),
        stored([7, 8], range(8), extra_keys=[[], []]),
        stored([7, 8], range(8), cache_salt="tenant", medium="EXTERNAL"),
        stored([7, 8], range(8), cache_salt=""),
        stored([8], range(4), parent=900, cache_salt="tenant"),
        stored([8], range(4), parent=900),
        stored([8], range(4), parent=12345),
        dict(reversed(stored([8], range(4), parent=900, medium="GPU").items())),
        removed(900),
        removed(900, 901, b"12345678", medium="GPU"),
        removed(900, medium="cpu"),
        removed(),
        {"type": "AllBlocksCleared"},
        {"type": "AllBlocksCleared", "medium": "GPU"},
        {"type": "Unheard", "anything": [1, 2]},
        ["BlockMoved", 1, 2],
        ["AllBlocksCleared"],
        ["BlockRemoved", [900], "GPU", 0, "more"],
        as_array(stored([1, 2], range(8), medium="GPU")),
        [*as_array(stored([1, 2], range(8), extra_keys=[["k"], None])), 0, "full_attention"],
    ],
)
def test_usual_forms_are_read_compiled(event: Any, left_over: list[bytes]) -> None:
    check_same([KNOWN, batch(event), batch(event, event), batch(removed(1, 7, 8))])
    assert left_over == [KNOWN]


@pytest.mark.parametrize(
    "event",
    [
        stored([7], range(4), extra_keys=[[["image", 0]]]),
        stored([7], range(4), extra_keys=[["sälz"]]),
        stored([7], range(4), extra_keys=[["salt"]], cache_salt="salt"),
        stored([7], range(4), extra_keys=[["x"]], cache_salt="salt"),
        stored([7], range(4), extra_keys=[None, None]),
        stored([7], range(4), extra_keys=[["x" * 5000]]),
        stored([7], range(4), extra_keys=[["x", 5, b"y", None, 1.5]]),
        stored([7], range(4), lora_id=3),
        stored([7], range(4), lora_name="größe"),
        stored([7], range(4), lora_name=5),
        stored([7], range(4), medium="TAPE"),
        stored([7], range(4), medium="\u017fsd"),
        stored([7], range(4), medium="a name much too long for a medium"),
        stored([7], range(4), cache_salt=5),
        stored([7], range(4), unheard={"a": 1}),
        stored([7], range(4), group_idx=-1),
        stored([7], range(4), group_idx="first"),
        stored([7], range(4), group_idx=2**32, kv_cache_spec_kind="full_attention"),
        stored([7], range(4), group_idx=0, kv_cache_spec_kind=1),
        stored([7], range(4), group_idx="first", kv_cache_spec_kind="mamba"),
        removed(900, group_idx=1.5),
        stored([7], [1, 2, 3, -4]),
        stored([7], [1, 2, 3, 2**32]),
        stored([7], [1, 2, 3, 1.5]),
        stored([True], range(4)),
        stored([b"short"], range(4)),
        stored(["text"], range(4)),
        stored([7], range(4), block_size=0),
        stored([7], range(4), block_size=True),
        stored([7], range(4), block_size=2**63),
        stored([7], range(4), parent="text"),
        {"type": "BlockStored", "block_hashes": [], "token_ids": [], "block_size": 4},
        {"type": "BlockStored"},
        {"type": "BlockRemoved"},
        {"type": 5},
        {"type": "Unheard", "block_hashes": "text"},
        {"block_hashes": [1]},
        {1: 2, "type": "AllBlocksCleared"},
        [],
        {},
        5,
        None,
        ["BlockStored"],
        ["BlockRemoved", [900], 7],
    ],
)
def test_everything_else_is_left_to_the_decoder(event: Any, left_over: list[bytes]) -> None:
    payload = batch(stored([1], range(4)), event, removed(1))
    check_same([KNOWN, payload, payload, batch(removed(7))], group=4)
    assert left_over[:3] == [KNOWN, payload, payload]


def test_adapters_are_read_compiled_once_they_are_known(left_over: list[bytes]) -> None:
    tokens = range(8)
    first = batch(stored([1, 2], tokens, lora_name="sql", lora_id=1, extra_keys=[["sql"], ["sql"]]))
    second = batch(
        stored([3, 4], tokens, lora_name="sql", lora_id=1, extra_keys=[["sql", "salt"], ["sql"]]),
        stored([5, 6], tokens, lora_name="sql", extra_keys=[["sql", "sql"], ["sq"]]),
    )
    stream = check_same([first, second, batch(removed(1, 3))])
    assert left_over == [first]
    assert len(stream.index.residencies(HOLDER)) == 4


def test_tokens_and_hashes_of_any_width() -> None:
    """Encoders may write small numbers wide."""

    def wide(value: int) -> bytes:
        return b"\xcf" + value.to_bytes(8, "big")

    def signed(value: int) -> bytes:
        return b"\xd3" + value.to_bytes(8, "big", signed=True)

    def array(*items: bytes) -> bytes:
        return b"\xdc" + len(items).to_bytes(2, "big") + b"".join(items)

    def text(value: str) -> bytes:
        return b"\xda" + len(value).to_bytes(2, "big") + value.encode()

    for integer in (wide, signed):
        fields = [
            (text("type"), text("BlockStored")),
            (text("token_ids"), array(*(integer(token) for token in (1, 2, 3, 70_000)))),
            (text("block_hashes"), array(integer(5), integer(6))),
            (text("block_size"), integer(2)),
        ]
        event = b"\xde" + len(fields).to_bytes(2, "big") + b"".join(key + value for key, value in fields)
        payload = array(integer(0), array(event), b"\xc0")
        stream = check_same([batch(stored([9], [5, 5])), payload, batch(removed(5))])
        assert len(stream.index.residencies(HOLDER)) == 2
        assert stream.errors == []


def test_every_truncation_is_one_error() -> None:
    """What is left in memory behind a cut payload, here its own rest, is never read."""
    payload = batch(
        stored([1, b"x" * 32], range(200, 208), medium="GPU", extra_keys=[["salt"], None]), removed(1)
    )
    stream = Stream(compiled=True)
    stream.apply([KNOWN])
    before = stream.index.residencies(HOLDER)
    for length in range(len(payload)):
        stream.apply([payload])
        stream.apply([payload[:length]])
        stream.apply([batch(removed(b"x" * 32))])
        assert len(stream.errors) == length + 1
    assert stream.index.residencies(HOLDER) == before


def test_nothing_of_a_bad_payload_is_applied_and_the_others_are() -> None:
    good, bad = batch(stored([1], range(4))), batch(stored([2], range(10, 14)))[:-1]
    stream = check_same([KNOWN, good, bad, b"", batch(stored([3], range(20, 24), parent=1))], group=5)
    assert len(stream.index.residencies(HOLDER)) == 3
    assert stream.ingest.counters == IngestCounters(events=3)
    assert [field for field, _ in stream.errors] == ["payload", "payload"]


def test_an_unregistered_holder_is_an_error() -> None:
    index = CacheIndex()
    stream = StreamIngest(index, HOLDER, "tiny")
    for _ in range(2):
        with pytest.raises(UnknownHolderError):
            stream.apply_payloads([KNOWN])
    index.register(HOLDER)
    assert stream.apply_payloads([KNOWN]) == []
    assert len(index.residencies(HOLDER)) == 1


def test_large_payloads_are_applied_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others get the index in between, tables grow meanwhile, and the result is the same."""
    monkeypatch.setattr(wire, "BLOCKS_PER_HOLD", 100)
    blocks = 3000
    hashes, tokens = range(1, blocks + 1), range(4 * blocks)
    payloads = [
        KNOWN,
        batch(stored(hashes, tokens), removed(*range(5, 1500, 3))),
        batch(*(removed(number) for number in range(1500, 2500)), stored([5000], range(4), parent=blocks)),
        batch(stored(hashes, tokens, medium="cpu"), {"type": "AllBlocksCleared", "medium": "GPU"}),
        batch(stored(hashes[:1000], tokens[:4000]), {"type": "AllBlocksCleared"}, stored([1], range(4))),
    ]
    check_same(payloads)
    check_same(payloads, group=5)


def test_no_hold_of_the_index_is_long(monkeypatch: pytest.MonkeyPatch) -> None:
    holds: list[int] = []
    maintain = slots.Slots.maintain

    def record(self: slots.Slots, blocks: int) -> None:
        holds.append(blocks)
        maintain(self, blocks)

    stream = Stream(compiled=True)
    stream.apply([KNOWN])
    monkeypatch.setattr(slots.Slots, "maintain", record)
    stream.apply([batch(stored(range(1, 5001), range(20_000)), removed(*range(1, 5001)))])
    assert sum(holds) == 10_000
    assert max(holds) <= wire.BLOCKS_PER_HOLD


def test_a_huge_payload_is_left_to_the_decoder(
    monkeypatch: pytest.MonkeyPatch, left_over: list[bytes]
) -> None:
    monkeypatch.setattr(ingest, "LARGEST_PAYLOAD", 5000)
    monkeypatch.setattr(ingest, "BYTES_AT_ONCE", 1000)
    huge, small = batch(stored(range(1, 1001), range(2000))), batch(removed(*range(1, 500)))
    check_same([KNOWN, huge, huge[:-1], small, small], group=5)
    assert left_over == [KNOWN, huge, huge[:-1]]


def test_readers_and_writers_at_once() -> None:
    """Four streams in threads of their own, and somebody who asks all the time."""
    index = CacheIndex()
    prompt = batch(stored(range(1, 65), range(256)))
    gone = batch(*(removed(number) for number in range(1, 65)))
    holders = [Holder("engine", rank) for rank in range(4)]
    failures: list[Exception] = []

    def feed(holder: Holder) -> None:
        stream = StreamIngest(index, holder, "tiny")
        try:
            for _ in range(100):
                assert stream.apply_payloads([prompt, gone, prompt, prompt, gone]) == []
                stream.apply_payloads([gone])
        except Exception as error:
            failures.append(error)

    for holder in holders:
        index.register(holder)
    threads = [threading.Thread(target=feed, args=(holder,)) for holder in holders]
    for thread in threads:
        thread.start()
    namespace, hashes_of_prompt = Namespace("tiny", 4), sequence_hashes(np.arange(256, dtype=np.uint32), 4)
    while any(thread.is_alive() for thread in threads):
        index.match(namespace, hashes_of_prompt)
    for thread in threads:
        thread.join()
    assert failures == []
    assert index.stats().residencies == 0


@pytest.mark.parametrize("name", ["read_payloads", "run_program"])
def test_a_wrong_kernel_is_a_clear_error(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire_kernels, name, lambda *_: 1)
    monkeypatch.setattr(self_check, "_ready", False)
    with pytest.raises(KernelError) as caught:
        warm()
    assert str(wire_kernels.CACHE_DIRECTORY) in str(caught.value)


def test_many_namespaces() -> None:
    payloads = [batch(stored([number], range(number)), removed(number)) for number in range(1, 40)]
    check_same(payloads * 2, group=7)
