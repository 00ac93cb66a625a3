"""Which hot prefixes continue which others, against a plain walk over the prompts themselves."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cache_index import CacheIndex, Holder, Namespace, Tier, sequence_hashes
from cache_index.hot_tree import hot_branches

BLOCK = 4
NAMESPACE = Namespace("llama", BLOCK)
A, B = Holder("a"), Holder("b", 1)

prompts = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=6), min_size=1, max_size=8)


def _hashes(words: list[int]) -> np.ndarray:
    return sequence_hashes(np.repeat(np.array(words, np.uint32), BLOCK), BLOCK)


@given(prompts)
def test_each_is_below_the_nearest_hot_one(asked: list[list[int]]) -> None:
    index = CacheIndex()
    index.register(A)
    for words in asked:
        index.store(A, Tier.DEVICE, NAMESPACE, _hashes(words))
    for words in asked:
        index.match(NAMESPACE, _hashes(words))
    branches = hot_branches(index, 100)
    hot = {int(_hashes(words)[-1]) ^ NAMESPACE.domain for words in asked}
    assert {branch.prefix.hash for branch in branches} == hot
    expected = {}
    for words in asked:
        chain = [int(each) ^ NAMESPACE.domain for each in _hashes(words)]
        expected[chain[-1]] = next((each for each in reversed(chain[:-1]) if each in hot), None)
    assert {branch.prefix.hash: branch.above for branch in branches} == expected


def test_holders_are_named_with_their_tiers() -> None:
    index = CacheIndex()
    for holder, tier in ((A, Tier.DEVICE), (B, Tier.HOST)):
        index.register(holder)
        index.store(holder, tier, NAMESPACE, _hashes([0, 1]))
    index.match(NAMESPACE, _hashes([0, 1, 0]))
    (branch,) = hot_branches(index, 5)
    assert (branch.above, branch.prefix.depth) == (None, 1)
    assert set(branch.held_by) == {(A, Tier.DEVICE), (B, Tier.HOST)}


def test_a_long_way_between_two_is_walked() -> None:
    index = CacheIndex()
    index.register(A)
    words = [number % 7 for number in range(3_000)]
    index.store(A, Tier.DEVICE, NAMESPACE, _hashes(words))
    for blocks in (10, 3_000):
        index.match(NAMESPACE, _hashes(words[:blocks]))
    above = {branch.prefix.depth: branch.above for branch in hot_branches(index, 5)}
    assert above == {9: None, 2_999: int(_hashes(words)[9]) ^ NAMESPACE.domain}
