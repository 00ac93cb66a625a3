"""Block hashes against frames recorded from vLLM with ``--prefix-caching-hash-algo sha256_cbor``."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from simulator.block_hash import ROOT, HashChain, block_digest, digest_as_int

FRAMES = Path(__file__).parent / "data" / "vllm_sha256_cbor_frames.jsonl"


def recorded_stores() -> list[dict[str, Any]]:
    payloads = [bytes.fromhex(json.loads(line)["frames_hex"][2]) for line in FRAMES.read_text().splitlines()]
    events = [event for payload in payloads for event in msgspec.msgpack.decode(payload)[1]]
    return [event for event in events if event["type"] == "BlockStored"]


def test_the_recording_has_salted_and_continued_chains() -> None:
    stores = recorded_stores()
    assert any(store["parent_block_hash"] for store in stores)
    assert any(any(store["extra_keys"]) for store in stores)


@pytest.mark.parametrize("store", recorded_stores())
def test_recorded_hashes_are_reproduced(store: dict[str, Any]) -> None:
    size, parent = store["block_size"], store["parent_block_hash"] or ROOT
    for index, expected in enumerate(store["block_hashes"]):
        keys = store["extra_keys"][index]
        tokens = store["token_ids"][index * size : (index + 1) * size]
        parent = block_digest(parent, tokens, keys[0] if keys else None)
        assert parent == expected


def test_large_token_ids_and_long_salts_are_encoded() -> None:
    # Known answers: hashlib over cbor2's canonical encoding of the same values.
    import hashlib

    salt = "s" * 300
    encoded = b"\x83\x58\x20" + ROOT + b"\x82\x19\xff\xff\x1a\x00\x01\x00\x00"
    encoded += b"\x81\x82\x6acache_salt\x79\x01\x2c" + salt.encode()
    assert block_digest(ROOT, [65_535, 65_536], salt) == hashlib.sha256(encoded).digest()


def test_the_published_integer_is_the_low_64_bits() -> None:
    assert digest_as_int(bytes(24) + b"\x80" + bytes(6) + b"\x01") == (1 << 63) + 1


def test_a_chain_follows_tokens_that_are_appended() -> None:
    tokens = [1, 2, 3]
    chain = HashChain(tokens, 2)
    first = list(chain.digests(1))
    tokens.append(4)
    assert chain.digests(2) == HashChain([1, 2, 3, 4], 2).digests(2)
    assert chain.digests(2)[:1] == first


def test_a_salt_separates_whole_chains() -> None:
    plain, salted = HashChain([1, 2, 3, 4], 2), HashChain([1, 2, 3, 4], 2, "tenant")
    assert not set(plain.digests(2)) & set(salted.digests(2))


@pytest.mark.parametrize(("tokens", "usable"), [(1, 0), (16, 0), (17, 1), (64, 3), (65, 4)])
def test_the_last_token_is_never_usable(tokens: int, usable: int) -> None:
    assert HashChain([0] * tokens, 16).usable_blocks() == usable
