"""Hashes of a prompt's beginning that are known already: what is worked out behind them is what is without them."""

from __future__ import annotations

import numpy as np
import pytest
from cluster_factory import BLOCK, hold, make_scheduler, request
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from cache_index import CacheIndex, Holder, Namespace, Tier, sequence_hashes
from conductor.prefix_lookup import hashes_of


@given(
    st.integers(0, 200),
    st.sampled_from([1, 4, 16]),
    st.none() | st.just("salt"),
    st.floats(0.0, 1.0),
    st.integers(0, 200),
)
def test_what_is_matched_behind_known_hashes(
    length: int, block_size: int, salt: str | None, share: float, held: int
) -> None:
    index, holder = CacheIndex(), Holder("e0", 0)
    namespace = Namespace("llama", block_size)
    tokens = np.random.default_rng(length).integers(0, 32_000, length, dtype=np.uint32)
    hashes = sequence_hashes(tokens, block_size, cache_salt=salt)
    index.register(holder)
    index.store(holder, Tier.DEVICE, namespace, hashes[:held])
    expected = index.match(namespace, hashes)
    known = hashes[: round(share * len(hashes))]
    found, levels = index.match_tokens(namespace, tokens, cache_salt=salt, known=known)
    assert found.tolist() == hashes.tolist()
    assert levels.tolist() == expected.tolist()


@pytest.mark.parametrize("known_blocks", [None, 0, 10, 64])
def test_a_placement_leaves_all_hashes(known_blocks: int | None) -> None:
    scheduler = make_scheduler("mm")
    asked = request(64 * BLOCK + 3)
    hashes = sequence_hashes(asked.tokens, BLOCK)
    hold(scheduler, "m1", asked.tokens[: 40 * BLOCK])
    if known_blocks is not None:
        asked.known_hashes[BLOCK] = hashes[:known_blocks]
    placement = scheduler.place(asked, 0.0)
    assert placement.decode.instance_id == "m1" and placement.overlap_tokens == 40 * BLOCK
    assert asked.known_hashes[BLOCK].tolist() == hashes.tolist()
    assert hashes_of(asked, BLOCK) is asked.known_hashes[BLOCK]


def test_known_hashes_of_other_blocks_are_no_use() -> None:
    asked = request(64)
    asked.known_hashes[8] = sequence_hashes(asked.tokens, 8)
    found = hashes_of(asked, 16)
    assert found is not None and found.tolist() == sequence_hashes(asked.tokens, 16).tolist()


def test_hashes_stand_for_tokens_that_nobody_knows() -> None:
    hashes = sequence_hashes(request(64).tokens, BLOCK)
    asked = replace(request(0), hashes=hashes, hashes_block_size=BLOCK)
    assert hashes_of(asked, BLOCK) is hashes
    assert hashes_of(asked, 2 * BLOCK) is None
    assert hashes_of(request(0), BLOCK) is None
