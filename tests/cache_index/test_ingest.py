"""Events applied to the index: recorded streams of a real engine, and the special cases one by one."""

from __future__ import annotations

import json
import struct
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import xxhash

from cache_index import CacheIndex, Holder, Namespace, StreamIngest, Tier, decode_batch, sequence_hashes
from cache_index.hashing import fold_extra_keys

RECORDED = Path(__file__).parents[2].parent / "shared" / "fixtures" / "vllm_kv_events.jsonl"
HOLDER = Holder("engine")
MEDIA = {"GPU": Tier.DEVICE, "cpu": Tier.HOST}
FIELDS = [
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
]


def recorded_batches() -> dict[str, list[tuple[bytes, list[Any]]]]:
    """(payload, decoded) per recorded stream."""
    if not RECORDED.exists():
        pytest.skip("no recorded frames")
    streams: dict[str, list[tuple[bytes, list[Any]]]] = {}
    for line in RECORDED.read_text().splitlines():
        record = json.loads(line)
        batches = streams.setdefault(record["label"], [])
        batches.append((bytes.fromhex(record["frames_hex"][-1]), record["decoded"]))
    return streams


def as_int(value: Any) -> int:
    return int(value["__bytes_hex__"][-16:], 16) if isinstance(value, dict) else int(value)


class Model:
    """What the events say, in a plain multiset, with hashes from the xxhash library."""

    def __init__(self) -> None:
        self.copies: Counter[tuple[int, Tier]] = Counter()
        self.names: dict[int, tuple[int, int]] = {}  # engine hash -> (sequence hash, key)

    def apply(self, event: dict[str, Any]) -> None:
        if event["type"] == "AllBlocksCleared":
            self.copies.clear()
        elif event["type"] == "BlockRemoved":
            for engine_hash in event["block_hashes"]:
                residency = (self.names[as_int(engine_hash)][1], MEDIA[event["medium"]])
                assert self.copies[residency] > 0
                self.copies[residency] -= 1
        else:
            self.store(event)

    def store(self, event: dict[str, Any]) -> None:
        size, parent = event["block_size"], event["parent_block_hash"]
        domain = Namespace("tiny", size, event.get("lora_name")).domain
        previous = self.names[as_int(parent)][0] if parent is not None else None
        for block, engine_hash in enumerate(event["block_hashes"]):
            tokens = np.array(event["token_ids"][block * size : (block + 1) * size], "<u4")
            digest = xxhash.xxh3_64_intdigest(tokens.tobytes(), 1337)
            keys = [
                key for key in ((event.get("extra_keys") or {block: None})[block] or []) if key != "lora1"
            ]
            if keys:
                digest = xxhash.xxh3_64_intdigest(struct.pack("<QQ", digest, fold_extra_keys(keys)), 1337)
            if previous is not None:
                digest = xxhash.xxh3_64_intdigest(struct.pack("<QQ", previous, digest), 1337)
            previous = digest
            self.names[as_int(engine_hash)] = (digest, digest ^ domain)
            self.copies[digest ^ domain, MEDIA[event["medium"]]] += 1

    def residencies(self) -> set[tuple[int, Tier]]:
        return {residency for residency, copies in self.copies.items() if copies > 0}


def new_ingest(**options: Any) -> tuple[CacheIndex, StreamIngest]:
    index = CacheIndex()
    index.register(HOLDER)
    return index, StreamIngest(index, HOLDER, "tiny", **options)


def batch_of(*events: dict[str, Any]) -> bytes:
    return msgspec.msgpack.encode([0.0, list(events), 0])


def stored(hashes: list[int], tokens: list[int], parent: int | None = None, **more: Any) -> dict[str, Any]:
    return {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": parent,
        "token_ids": tokens,
        "block_size": len(tokens) // len(hashes),
        **more,
    }


def removed(*hashes: int, **more: Any) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": list(hashes), **more}


def prefix(index: CacheIndex, tokens: list[int], block_size: int = 4, **namespace: Any) -> int:
    """Blocks of the prompt that the holder has on its device."""
    row = index.holder_id(HOLDER)
    assert row is not None
    hashes = sequence_hashes(np.array(tokens, np.uint32), block_size)
    return int(index.match(Namespace("tiny", block_size, **namespace), hashes)[row, 0])


@pytest.mark.parametrize("label", ["A_bs32_sha256", "B_bs128default_sha256cbor_bytes", "S1_mcstore"])
def test_recorded_frames_give_what_they_say(label: str) -> None:
    index, ingest = new_ingest()
    model = Model()
    for payload, decoded in recorded_batches()[label]:
        ingest.apply(decode_batch(payload))
        for event in decoded[1]:
            model.apply(event)
        assert index.residencies(HOLDER) == model.residencies()
    assert model.residencies()
    counters = ingest.counters
    assert (counters.malformed_events, counters.unknown_events, counters.unresolved_blocks) == (0, 0, 0)


def test_every_recorded_stream_is_covered() -> None:
    assert set(recorded_batches()) == {"A_bs32_sha256", "B_bs128default_sha256cbor_bytes", "S1_mcstore"}


def plain(value: Any) -> Any:
    """A decoded value with its bytes as bytes."""
    if isinstance(value, dict) and set(value) == {"__bytes_hex__"}:
        return bytes.fromhex(value["__bytes_hex__"])
    return [plain(each) for each in value] if isinstance(value, list) else value


def as_array(event: dict[str, Any]) -> list[Any]:
    fields = {
        "BlockStored": FIELDS,
        "BlockRemoved": ["block_hashes", "medium", "group_idx"],
        "AllBlocksCleared": [],
    }[event["type"]]
    return [event["type"], *(plain(event.get(field)) for field in fields)]


def test_array_events_give_the_same_as_maps() -> None:
    for batches in recorded_batches().values():
        index_of_maps, maps = new_ingest()
        index_of_arrays, arrays = new_ingest()
        for payload, decoded in batches:
            maps.apply(decode_batch(payload))
            array_payload = msgspec.msgpack.encode([decoded[0], [as_array(each) for each in decoded[1]], 0])
            arrays.apply(decode_batch(array_payload))
            assert index_of_maps.residencies(HOLDER) == index_of_arrays.residencies(HOLDER)
        assert maps.counters == arrays.counters


def test_three_copies_need_three_removals() -> None:
    index, ingest = new_ingest()
    tokens = list(range(8))
    ingest.apply(decode_batch(batch_of(stored([1, 2], tokens))))
    ingest.apply(decode_batch(batch_of(stored([2], tokens[4:], parent=1), stored([2], tokens[4:], parent=1))))
    ingest.apply(decode_batch(batch_of(removed(2), removed(2))))
    assert prefix(index, tokens) == 2
    ingest.apply(decode_batch(batch_of(removed(2))))
    assert prefix(index, tokens) == 1


def test_an_unknown_parent_is_counted_and_never_becomes_a_root() -> None:
    index, ingest = new_ingest()
    ingest.apply(decode_batch(batch_of(stored([5, 6], list(range(8)), parent=99))))
    assert index.residencies(HOLDER) == set()
    assert prefix(index, list(range(8))) == 0
    assert ingest.counters.unresolved_blocks == 2
    ingest.apply(decode_batch(batch_of(removed(5))))
    assert ingest.counters.unresolved_blocks == 2 or index.stats().residencies == 0


def test_a_removal_of_an_unknown_block_is_counted() -> None:
    index, ingest = new_ingest()
    ingest.apply(decode_batch(batch_of(stored([1], [1, 2, 3, 4]), removed(7))))
    assert ingest.counters.unresolved_blocks == 1
    assert index.stats().residencies == 1


def test_stores_and_removals_keep_their_order() -> None:
    index, ingest = new_ingest()
    tokens = [1, 2, 3, 4]
    ingest.apply(decode_batch(batch_of(stored([1], tokens), removed(1), stored([1], tokens))))
    assert prefix(index, tokens) == 1
    ingest.apply(decode_batch(batch_of(removed(1), {"type": "AllBlocksCleared"}, stored([1], tokens))))
    assert prefix(index, tokens) == 1


def test_tiers_are_separate_and_a_clear_of_one_spares_the_other() -> None:
    index, ingest = new_ingest()
    tokens = [1, 2, 3, 4]
    ingest.apply(decode_batch(batch_of(stored([1], tokens), stored([1], tokens, medium="cpu"))))
    ingest.apply(decode_batch(batch_of(removed(1, medium="GPU"))))
    assert {tier for _, tier in index.residencies(HOLDER)} == {Tier.HOST}
    ingest.apply(decode_batch(batch_of(stored([1], tokens), {"type": "AllBlocksCleared", "medium": "CPU"})))
    assert {tier for _, tier in index.residencies(HOLDER)} == {Tier.DEVICE}


def test_adapters_do_not_share_with_the_base_model() -> None:
    index, ingest = new_ingest()
    tokens = [1, 2, 3, 4]
    ingest.apply(decode_batch(batch_of(stored([1], tokens, lora_name="a", extra_keys=[["a"]]))))
    assert prefix(index, tokens) == 0
    assert prefix(index, tokens, lora="b") == 0
    assert prefix(index, tokens, lora="a") == 1
    ingest.apply(decode_batch(batch_of(removed(1))))
    assert prefix(index, tokens, lora="a") == 0


def test_a_cache_salt_matches_requests_with_that_salt_only() -> None:
    index, ingest = new_ingest()
    tokens = list(range(8))
    ingest.apply(decode_batch(batch_of(stored([1, 2], tokens, extra_keys=[["salt"], None]))))
    namespace = Namespace("tiny", 4)
    for salt, blocks in (("salt", 2), ("pepper", 0), (None, 0)):
        hashes = sequence_hashes(np.array(tokens, np.uint32), 4, cache_salt=salt)
        assert index.match(namespace, hashes)[0, 0] == blocks


def test_keys_without_a_canonical_form_are_refused() -> None:
    index, ingest = new_ingest()
    event = stored([1], [1, 2, 3, 4], extra_keys=[[msgspec.msgpack.Ext(5, b"x")]])
    ingest.apply(decode_batch(batch_of(event)))
    assert ingest.counters.malformed_events == 1
    assert index.stats().blocks == 0


def test_tenants_and_models_are_separate() -> None:
    index = CacheIndex()
    index.register(HOLDER)
    first = StreamIngest(index, HOLDER, "tiny", tenant="a")
    second = StreamIngest(index, HOLDER, "tiny", tenant="b")
    first.apply(decode_batch(batch_of(stored([1], [1, 2, 3, 4]))))
    second.apply(decode_batch(batch_of(stored([2], [5, 6, 7, 8], parent=1))))
    assert second.counters.unresolved_blocks == 1
    assert prefix(index, [1, 2, 3, 4], tenant="a") == 1
    assert prefix(index, [1, 2, 3, 4], tenant="b") == 0


def test_another_block_size_than_configured_is_refused() -> None:
    index, ingest = new_ingest(block_size=4)
    ingest.apply(decode_batch(batch_of(stored([1], [1, 2, 3, 4]), stored([2], [1, 2]))))
    assert (ingest.counters.malformed_events, index.stats().blocks) == (1, 1)


@pytest.mark.parametrize("block_size", [1 << 63, (1 << 64) - 1, 0, -4])
def test_an_impossible_block_size_is_refused_and_stops_nothing(block_size: int) -> None:
    index, ingest = new_ingest()
    impossible = stored([1], [1, 2, 3, 4]) | {"block_hashes": [], "token_ids": [], "block_size": block_size}
    assert ingest.apply_payloads([batch_of(impossible, stored([1], [1, 2, 3, 4]))]) == []
    assert (ingest.counters.malformed_events, index.stats().blocks) == (1, 1)


def test_two_engines_with_different_hashes_share_blocks() -> None:
    index, ingest = new_ingest()
    other_holder = Holder("other")
    index.register(other_holder)
    other = StreamIngest(index, other_holder, "tiny")
    tokens = list(range(8))
    ingest.apply(decode_batch(batch_of(stored([1, 2], tokens))))
    other.apply(decode_batch(batch_of(stored([101, 102], tokens))))
    assert index.stats().blocks == 2
    ingest.apply(decode_batch(batch_of(removed(2), removed(1))))
    assert index.residencies(HOLDER) == set()
    assert len(index.residencies(other_holder)) == 2
