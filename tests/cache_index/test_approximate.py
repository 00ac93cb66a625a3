"""Assumed residency against a plain model of it."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_index import CacheIndex, Holder, Namespace, Tier, UnknownHolderError, sequence_hashes
from cache_index.approximate import ApproximateResidency
from cache_index.hashing import Hashes
from cache_index.kernels.assumed import NUMBER

BLOCK = 4
NAMESPACE = Namespace("tiny", BLOCK)
OTHER = Namespace("tiny", BLOCK, "adapter")
ENGINE = Holder("engine")
TTL_S = 10.0


def chain(*tokens: int) -> Hashes:
    """Hashes of a prompt that repeats each token for a block."""
    return sequence_hashes(np.repeat(np.array(tokens, np.uint32), BLOCK), BLOCK)


def matched(index: CacheIndex, *tokens: int, namespace: Namespace = NAMESPACE) -> int:
    row = index.holder_id(ENGINE)
    assert row is not None
    return int(index.match(namespace, chain(*tokens))[row, Tier.DEVICE])


def made(capacity_blocks: int = 100) -> tuple[CacheIndex, ApproximateResidency]:
    index = CacheIndex()
    residency = ApproximateResidency(index, ttl_s=TTL_S)
    residency.add(ENGINE, capacity_blocks)
    return index, residency


def check_book(residency: ApproximateResidency) -> None:
    """Every run is in its place, and found by the first key that it has left."""
    book = residency._holders[ENGINE]
    runs = book.runs()
    assert sum(len(keys) for _, _, keys in runs) == book.blocks
    assert [number for number, _, _ in runs] == sorted({number for number, _, _ in runs})
    names = {int(key): int(row) - 1 for key, row in book._table if row}
    assert {key: int(book._rows[row, NUMBER]) for key, row in names.items()} == {
        keys[0]: number for number, _, keys in runs
    }


def test_what_was_routed_is_assumed() -> None:
    index, residency = made()
    assert list(residency.assume(ENGINE, NAMESPACE, chain(1, 2, 3), 0.0)) == []
    assert matched(index, 1, 2, 3, 4) == 3
    assert list(residency.assume(ENGINE, NAMESPACE, chain(1, 2, 9), 1.0)) == [0, 0]
    assert residency.blocks(ENGINE) == 4
    assert residency.predicted == {ENGINE}


def test_holders_that_were_not_added_are_left_alone() -> None:
    index, residency = made()
    other = Holder("publishes")
    index.register(other)
    assert not len(residency.assume(other, NAMESPACE, chain(1), 0.0))
    assert residency.evicted(other, 1) == 0
    residency.forget(other)
    residency.remove(other)
    assert index.stats().blocks == 0
    assert residency.predicted == {ENGINE}


def test_the_least_recently_used_go_first_and_of_one_request_the_deepest() -> None:
    index, residency = made(capacity_blocks=4)
    residency.assume(ENGINE, NAMESPACE, chain(1, 2, 3), 0.0)
    residency.assume(ENGINE, NAMESPACE, chain(1, 5), 1.0)
    assert (matched(index, 1, 2, 3), matched(index, 1, 5)) == (3, 2)
    residency.assume(ENGINE, NAMESPACE, chain(6), 2.0)
    assert (matched(index, 1, 2, 3), matched(index, 1, 5), matched(index, 6)) == (2, 2, 1)
    assert residency.blocks(ENGINE) == 4


def test_of_a_chain_beyond_the_capacity_the_beginning_is_kept() -> None:
    index, residency = made(capacity_blocks=3)
    residency.assume(ENGINE, NAMESPACE, chain(9, 8), 0.0)
    residency.assume(ENGINE, NAMESPACE, chain(1, 2, 3, 4, 5), 1.0)
    assert (matched(index, 1, 2, 3, 4, 5), matched(index, 9)) == (3, 0)


def test_nothing_is_believed_beyond_its_time() -> None:
    index, residency = made()
    residency.assume(ENGINE, NAMESPACE, chain(1, 2), 0.0)
    residency.assume(ENGINE, NAMESPACE, chain(1), 6.0)
    residency.expire(TTL_S)
    assert matched(index, 1, 2) == 1
    residency.expire(6.0 + TTL_S)
    assert matched(index, 1) == 0
    assert index.stats().residencies == 0


def test_an_eviction_tells_of_everything_used_no_later() -> None:
    index, residency = made()
    residency.assume(ENGINE, NAMESPACE, chain(1, 2, 3), 0.0)
    residency.assume(ENGINE, NAMESPACE, chain(1, 7), 1.0)
    residency.assume(ENGINE, NAMESPACE, chain(8), 2.0)
    assert residency.evicted(ENGINE, 0) == 2
    assert (matched(index, 1, 2, 3), matched(index, 1, 7), matched(index, 8)) == (1, 2, 1)
    assert residency.evicted(ENGINE, 1) == 2
    assert (matched(index, 1, 7), matched(index, 8)) == (0, 1)


def test_a_request_learns_which_one_routed_its_blocks_there_last() -> None:
    _, residency = made()
    residency.assume(ENGINE, NAMESPACE, chain(1, 2, 3), 0.0)
    residency.assume(ENGINE, NAMESPACE, chain(1, 7), 1.0)
    assert list(residency.assume(ENGINE, NAMESPACE, chain(1, 2, 3, 4), 2.0)) == [1, 0, 0]
    assert list(residency.assume(ENGINE, NAMESPACE, chain(1, 2), 2.0 + TTL_S)) == []


def test_everything_dropped_leaves_a_working_book() -> None:
    index, residency = made()
    residency.assume(ENGINE, NAMESPACE, chain(1, 2), 0.0)
    assert residency.evicted(ENGINE, 0) == 2
    residency.expire(2 * TTL_S)
    residency.assume(ENGINE, NAMESPACE, chain(1, 2), 3 * TTL_S)
    assert matched(index, 1, 2) == 2


def test_forgetting_and_removing() -> None:
    index, residency = made()
    residency.assume(ENGINE, NAMESPACE, chain(1, 2), 0.0)
    residency.forget(ENGINE)
    assert (matched(index, 1, 2), residency.blocks(ENGINE)) == (0, 0)
    residency.assume(ENGINE, NAMESPACE, chain(1, 2), 0.0)
    assert matched(index, 1, 2) == 2
    residency.remove(ENGINE)
    assert (matched(index, 1, 2), residency.predicted) == (0, set())


def test_what_was_learned_before_an_engine_was_lost_says_nothing_of_its_new_cache() -> None:
    index, residency = made()
    residency.assume(ENGINE, NAMESPACE, chain(1, 2), 0.0)
    before = residency.assume(ENGINE, NAMESPACE, chain(1, 2), 1.0)
    residency.forget(ENGINE)
    residency.assume(ENGINE, NAMESPACE, chain(1, 2), 2.0)
    assert residency.evicted(ENGINE, before[0]) == 0
    assert matched(index, 1, 2) == 2


def test_other_tiers_of_the_holder_are_not_touched() -> None:
    index, residency = made()
    index.store(ENGINE, Tier.HOST, NAMESPACE, chain(1, 2))
    residency.assume(ENGINE, NAMESPACE, chain(1, 2), 0.0)
    residency.remove(ENGINE)
    assert {tier for _, tier in index.residencies(ENGINE)} == {Tier.HOST}


def test_a_smaller_capacity_takes_effect_at_once() -> None:
    index, residency = made(capacity_blocks=8)
    residency.assume(ENGINE, NAMESPACE, chain(1, 2, 3, 4), 0.0)
    residency.add(ENGINE, 2)
    assert matched(index, 1, 2, 3, 4) == 2
    with pytest.raises(ValueError, match="capacity_blocks"):
        residency.add(ENGINE, 0)


def test_a_hot_prefix_does_not_grow_the_books() -> None:
    index, residency = made(capacity_blocks=16)
    for number in range(2000):
        residency.assume(ENGINE, NAMESPACE, chain(1, 2, 3, number % 5 + 10), number * 1e-3)
    assert residency.blocks(ENGINE) == 8 == index.stats().residencies
    check_book(residency)
    book = residency._holders[ENGINE]
    assert (len(book._rows), len(book._keys)) == (64, 1_024)  # as at the beginning


class Oracle:
    """Blocks in order of use, oldest first."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.used: dict[int, tuple[int, float]] = {}  # by which call, and when
        self.calls = 0

    def expire(self, now_s: float) -> None:
        self.used = {key: (call, at_s) for key, (call, at_s) in self.used.items() if at_s + TTL_S > now_s}

    def assume(self, keys: list[int], now_s: float) -> None:
        if not keys:
            return
        self.expire(now_s)
        for key in reversed(keys[: self.capacity]):
            self.used.pop(key, None)
            self.used[key] = (self.calls, now_s)
        self.calls += 1
        while len(self.used) > self.capacity:
            del self.used[next(iter(self.used))]

    def evicted(self, last_used: int) -> None:
        self.used = {key: (call, at_s) for key, (call, at_s) in self.used.items() if call > last_used}

    def last_used(self, keys: list[int]) -> list[int]:
        known = itertools.takewhile(lambda used: used is not None, map(self.used.get, keys))
        return [used[0] for used in known if used is not None]


_PROMPTS = st.lists(st.integers(0, 2), min_size=0, max_size=7)


@settings(max_examples=150, deadline=None)
@given(
    capacity=st.integers(1, 9),
    steps=st.lists(
        st.tuples(
            st.sampled_from(["assume", "assume", "evicted", "expire"]),
            _PROMPTS,
            st.sampled_from([NAMESPACE, OTHER]),
            st.integers(0, 7),
            st.sampled_from([0.0, 0.5, 4.0]),
        ),
        max_size=40,
    ),
)
def test_any_history_gives_what_the_oracle_holds(
    capacity: int, steps: list[tuple[str, list[int], Namespace, int, float]]
) -> None:
    index, residency = made(capacity)
    oracle, now_s = Oracle(capacity), 0.0
    for action, prompt, namespace, cached, later_s in steps:
        now_s += later_s
        hashes = chain(*prompt)
        keys = (hashes ^ np.uint64(namespace.domain)).tolist()
        if action == "assume":
            if keys:
                oracle.expire(now_s)
            expected = oracle.last_used(keys)
            assert list(residency.assume(ENGINE, namespace, hashes, now_s)) == expected
            oracle.assume(keys, now_s)
        elif action == "evicted":
            calls = sorted({call for call, _ in oracle.used.values()})
            if cached < len(calls):
                residency.evicted(ENGINE, calls[cached])
                oracle.evicted(calls[cached])
        else:
            residency.expire(now_s)
            oracle.expire(now_s)
        assert index.residencies(ENGINE) == {(key, Tier.DEVICE) for key in oracle.used}
        assert residency.blocks(ENGINE) == len(oracle.used) <= capacity
        check_book(residency)
    residency.expire(now_s + TTL_S)
    assert index.stats().residencies == 0


@pytest.mark.parametrize("seed", range(8))
def test_long_chains_and_many_requests_give_what_the_oracle_holds(seed: int) -> None:
    """More than the book and the index have room for at first, and more than the index takes in at once."""
    rng = np.random.default_rng(seed)
    capacity = int(rng.integers(500, 5_000))
    index, residency = made(capacity)
    oracle, chats = Oracle(capacity), [chain(*rng.integers(0, 9, 3_000).tolist()) for _ in range(4)]
    for call in range(300):
        if rng.random() < 0.7:
            hashes = chain(*rng.integers(0, 99, int(rng.integers(1, 12))).tolist())
        else:
            hashes = chats[rng.integers(len(chats))][: rng.integers(1, 3_000)]
        keys = (hashes ^ np.uint64(NAMESPACE.domain)).tolist()
        assert list(residency.assume(ENGINE, NAMESPACE, hashes, call * 0.01)) == oracle.last_used(keys)
        oracle.assume(keys, call * 0.01)
        assert residency.blocks(ENGINE) == len(oracle.used)
    check_book(residency)
    assert index.residencies(ENGINE) == {(key, Tier.DEVICE) for key in oracle.used}
    residency.add(ENGINE, 100)
    assert residency.blocks(ENGINE) == 100 == index.stats().residencies
    check_book(residency)
    assert residency.evicted(ENGINE, 300) == 100
    assert index.stats().residencies == 0


def test_many_short_requests_fit_into_the_book() -> None:
    """A run for each of them."""
    index, residency = made(20_000)
    prompts = sequence_hashes(np.arange(25_000 * BLOCK, dtype=np.uint32), BLOCK)
    for number, prompt in enumerate(prompts):
        residency.assume(ENGINE, NAMESPACE, np.array([prompt]), number * 1e-5)
    check_book(residency)
    assert [number for number, _, _ in residency._holders[ENGINE].runs()] == list(range(5_000, 25_000))
    assert index.stats().residencies == 20_000


def test_who_is_not_registered_is_told_so() -> None:
    index, residency = made()
    index.unregister(ENGINE)
    with pytest.raises(UnknownHolderError):
        residency.assume(ENGINE, NAMESPACE, chain(1), 0.0)
    assert residency.blocks(ENGINE) == 0
