"""A bounded index: never above its limit, and what is left matches as before."""

from __future__ import annotations

import random

import numpy as np
import pytest
from index_oracle import NAMESPACE, Both, PlainIndex, chain

from cache_index import CacheIndex, Holder, Tier, arrays
from cache_index import kernels as k

FLEET = [Holder(f"h{number}") for number in range(6)]


def bounded(max_blocks: int) -> CacheIndex:
    index = CacheIndex(max_blocks=max_blocks)
    for holder in FLEET:
        index.register(holder)
    return index


def oracle_of(index: CacheIndex) -> Both:
    """An oracle that knows exactly what the index still has."""
    both = Both.__new__(Both)
    both.index, both.plain = index, PlainIndex()
    for holder in FLEET:
        row = index.holder_id(holder)
        assert row is not None
        both.plain.register(holder, row)
        for key, tier in index.residencies(holder):
            both.plain.store(holder, tier, NAMESPACE, np.array([key ^ NAMESPACE.domain], np.uint64))
    return both


def test_the_limit_holds_and_memory_with_it() -> None:
    index = bounded(5_000)
    sizes = []
    for number in range(2_000):
        index.store(FLEET[number % 6], Tier.DEVICE, NAMESPACE, chain(number, 50))
        stats = index.stats()
        assert stats.blocks <= 5_000
        sizes.append(stats.bytes)
    assert max(sizes[300:]) == min(sizes[300:])
    stats = index.stats()
    assert stats.dropped_residencies == 2_000 * 50 - stats.residencies
    assert stats.blocks > 4_000
    assert stats.max_blocks == 5_000


def test_linked_blocks_are_bounded_as_well() -> None:
    index = bounded(3_000)
    sizes = []
    for number in range(1_000):
        hashes = chain(number, 40)
        index.store_linked(FLEET[0], Tier.DEVICE, NAMESPACE, hashes, hashes + np.uint64(1))
        sizes.append(index.stats().bytes)
    assert max(sizes[500:]) == min(sizes[500:])


def test_a_dropped_block_only_shortens_prefixes() -> None:
    index = bounded(4_000)
    hot = chain(1, 300)
    chains = []
    for number in range(300):
        chains.append(np.concatenate([hot, chain(10 + number, 60)]))
        index.store(FLEET[number % 6], Tier(number % 2), NAMESPACE, chains[-1])
        index.match(NAMESPACE, np.concatenate([hot, chain(9, 1)]))
    assert index.stats().gaps == 0
    assert index.match(NAMESPACE, hot)[:, 1].tolist() == [300] * 6  # often matched and shared: not dropped
    assert index.match(NAMESPACE, chains[-1]).max() == 360  # the last one
    assert index.match(NAMESPACE, chains[0]).max() < 360  # the first one
    both = oracle_of(index)
    for hashes in chains:
        both.check_match(hashes)


@pytest.mark.parametrize("seed", range(4))
def test_random_events_under_a_limit(seed: int) -> None:
    dice = random.Random(seed)
    index = bounded(dice.choice([1, 37, 400, 1500]))
    chains = [chain(number, 120) for number in range(30)]
    for each in chains[1:]:
        shared = dice.choice([0, 10, 60])
        each[:shared] = chains[0][:shared]
    for step in range(700):
        holder, tier, hashes = dice.choice(FLEET), Tier(dice.choice([0, 0, 1])), dice.choice(chains)
        start, stop = sorted(dice.randrange(121) for _ in range(2))
        action = dice.random()
        if action < 0.5:
            index.store(holder, tier, NAMESPACE, hashes[:stop])
        elif action < 0.65:
            parent = int(hashes[start - 1]) if start else 0
            index.store(holder, tier, NAMESPACE, hashes[start:stop], parent=parent)
        elif action < 0.7:
            index.store(holder, tier, NAMESPACE, hashes[start:stop])
        elif action < 0.85:
            index.remove(holder, tier, NAMESPACE, hashes[start:stop])
        elif action < 0.88:
            index.clear(holder)
        else:
            index.match(NAMESPACE, hashes)
        assert index.max_blocks is not None
        assert index.stats().blocks <= index.max_blocks
        if step % 50 == 0:
            both = oracle_of(index)
            for each in chains:
                both.check_match(each)


def test_a_chain_longer_than_the_limit() -> None:
    index = bounded(1_000)
    hashes = chain(1, 5_000)
    index.store(FLEET[0], Tier.DEVICE, NAMESPACE, hashes)
    assert index.stats().blocks <= 1_000
    oracle_of(index).check_match(hashes)


def test_retired_blocks_go_before_live_ones() -> None:
    index = bounded(2_000)
    index.store(FLEET[0], Tier.DEVICE, NAMESPACE, chain(1, 1_900))
    index.clear(FLEET[0])
    index.store(FLEET[1], Tier.DEVICE, NAMESPACE, chain(2, 1_500))
    assert index.stats().dropped_residencies == 0
    assert index.match(NAMESPACE, chain(2, 1_500)).max() == 1_500


def test_a_limit_must_be_positive() -> None:
    with pytest.raises(ValueError, match="positive"):
        CacheIndex(max_blocks=0)


# --- room made ahead ---------------------------------------------------------------------------------


def grown_in_the_background(index: CacheIndex) -> int:
    """Bytes, when nothing is left to do."""
    while index.reclaim():
        pass
    return index.stats().bytes


def test_what_is_expected_needs_no_growth_when_it_comes() -> None:
    index = CacheIndex()
    for holder in FLEET:
        index.register(holder)
    small = index.stats().bytes
    index.expect(100_000)
    before = grown_in_the_background(index)
    assert before > small + 100_000 * (k.NODE_BYTES + k.PAIR_BYTES)
    tables = [index._arrays.capacity(table) for table in (k.NODES, k.LINKS)]
    for number in range(1_000):
        hashes = chain(number, 100)
        index.store_linked(FLEET[number % 6], Tier.DEVICE, NAMESPACE, hashes, hashes + np.uint64(1))
        assert not index._arrays.is_growing(k.NODES)
        assert not index._arrays.is_growing(k.LINKS)
    assert [index._arrays.capacity(table) for table in (k.NODES, k.LINKS)] == tables
    assert index.stats().blocks == 100_000


def test_room_is_only_ever_added() -> None:
    index = CacheIndex()
    index.expect(50_000)
    before = grown_in_the_background(index)
    for blocks in (50_000, 0, 10):
        index.expect(blocks)
        assert grown_in_the_background(index) == before
    index.expect(80_000)
    assert grown_in_the_background(index) > before


def test_changes_grow_a_full_index_in_passing_and_stop_for_nothing() -> None:
    """No idle thread helps: growth takes its share with every store, whatever was expected."""
    index = CacheIndex()
    index.register(FLEET[0])
    index.store(FLEET[0], Tier.DEVICE, NAMESPACE, chain(0, 50_000))
    index.expect(400_000)
    for number in range(1, 300):
        index.store(FLEET[0], Tier.DEVICE, NAMESPACE, chain(number, 100))
    assert not index._arrays.growing
    assert index._arrays.capacity(k.NODES) > 400_000
    assert index.match(NAMESPACE, chain(0, 50_000))[0, 0] == 50_000


def test_nothing_is_expected_beyond_the_limit() -> None:
    unlimited, index = CacheIndex(), bounded(5_000)
    unlimited.expect(10_000)
    index.expect(5_000_000)
    assert grown_in_the_background(index) < grown_in_the_background(unlimited)


def test_expectations_leave_most_of_the_memory_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    available = 40_000_000
    monkeypatch.setattr(arrays, "available_bytes", lambda: available)
    index = CacheIndex()
    index.expect(1_000_000_000)
    assert available // 8 < grown_in_the_background(index) < available // 3
