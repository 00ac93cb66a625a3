"""Block hashing against the xxhash library."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_index import Namespace, chain_hashes, fold_extra_keys, sequence_hashes
from cache_index.hashing import canonical_hash

TOKENS = np.random.default_rng(5).integers(0, 1 << 32, 4096, dtype=np.uint32)


def expected_hashes(
    tokens: np.ndarray, block_size: int, seed: int = 1337, folds: list[int] | None = None, parent: int = 0
) -> list[int]:
    hashes: list[int] = []
    previous = parent
    for block in range(len(tokens) // block_size):
        piece = tokens[block * block_size : (block + 1) * block_size]
        local = xxhash.xxh3_64_intdigest(piece.astype("<u4").tobytes(), seed)
        if folds and block < len(folds) and folds[block]:
            local = xxhash.xxh3_64_intdigest(struct.pack("<QQ", local, folds[block]), seed)
        if previous:
            local = xxhash.xxh3_64_intdigest(struct.pack("<QQ", previous, local), seed)
        hashes.append(local)
        previous = local
    return hashes


def test_every_block_size_up_to_600() -> None:
    for block_size in range(1, 601):
        tokens = TOKENS[: 3 * block_size + block_size // 2]
        assert sequence_hashes(tokens, block_size).tolist() == expected_hashes(tokens, block_size), block_size


@pytest.mark.parametrize("block_size", [16, 32, 64, 128, 512])
@given(
    tokens=st.lists(st.integers(0, 2**32 - 1), max_size=1100),
    seed=st.integers(0, 2**64 - 1),
    parent=st.integers(0, 2**64 - 1),
    folds=st.lists(st.integers(0, 2**64 - 1), max_size=5),
)
@settings(max_examples=30, deadline=None)
def test_any_tokens_seed_parent_and_folds(
    block_size: int, tokens: list[int], seed: int, parent: int, folds: list[int]
) -> None:
    array = np.array(tokens, np.uint32)
    computed = chain_hashes(array, block_size, parent=parent, folds=np.array(folds, np.uint64), seed=seed)
    assert computed.tolist() == expected_hashes(array, block_size, seed, folds, parent)


def test_only_full_blocks_are_hashed() -> None:
    assert len(sequence_hashes(TOKENS[:15], 16)) == 0
    assert len(sequence_hashes(TOKENS[:47], 16)) == 2


def test_a_chain_can_be_continued() -> None:
    whole = sequence_hashes(TOKENS[:160], 16)
    rest = chain_hashes(TOKENS[64:160], 16, parent=int(whole[3]))
    assert whole[4:].tolist() == rest.tolist()


def test_read_only_strided_and_wider_input() -> None:
    expected = sequence_hashes(TOKENS[:64], 16).tolist()
    assert sequence_hashes(np.frombuffer(TOKENS[:64].tobytes(), np.uint32), 16).tolist() == expected
    assert sequence_hashes(np.repeat(TOKENS[:64], 2)[::2], 16).tolist() == expected
    assert sequence_hashes(TOKENS[:64].astype(np.int64), 16).tolist() == expected


def test_a_salt_changes_every_block() -> None:
    plain = sequence_hashes(TOKENS[:64], 16)
    salted = sequence_hashes(TOKENS[:64], 16, cache_salt="tenantA")
    other = sequence_hashes(TOKENS[:64], 16, cache_salt="tenantB")
    assert not {*plain.tolist()} & {*salted.tolist()}
    assert not {*other.tolist()} & {*salted.tolist()}
    assert salted.tolist() == expected_hashes(TOKENS[:64], 16, folds=[fold_extra_keys(["tenantA"])])
    assert sequence_hashes(TOKENS[:64], 16, cache_salt="").tolist() == plain.tolist()


def test_extra_keys_are_kept_apart() -> None:
    keys = [
        ["a"],
        ["b"],
        ["a", "b"],
        ["ab"],
        [["a"], "b"],
        [1],
        ["1"],
        [b"a"],
        [None],
        [True],
        [1.0],
        [{"a": 1}],
    ]
    assert len({fold_extra_keys(each) for each in keys}) == len(keys)
    assert fold_extra_keys([]) == fold_extra_keys(None) == 0
    with pytest.raises(TypeError, match="set"):
        fold_extra_keys([{1}])


def test_namespaces_have_domains_of_their_own() -> None:
    namespaces = [
        Namespace("m", 16),
        Namespace("m", 32),
        Namespace("n", 16),
        Namespace("m", 16, "lora"),
        Namespace("m", 16, tenant="t"),
        Namespace("m", 16, "default", "None"),
    ]
    assert len({each.domain for each in namespaces}) == len(namespaces)
    assert Namespace("m", 16) == Namespace("m", 16)
    assert Namespace("m", 16).domain == canonical_hash(["m", 16, None, "default"])


def test_block_size_must_be_positive() -> None:
    with pytest.raises(ValueError, match="block_size"):
        sequence_hashes(TOKENS[:16], 0)
