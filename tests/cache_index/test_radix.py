"""The index against a plain Python one."""

from __future__ import annotations

import random
import tempfile
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from index_oracle import MOST_COPIES, NAMESPACE, OTHER, Both, chain

from cache_index import CacheIndex, Changes, Holder, Namespace, Tier, UnknownHolderError
from cache_index.arrays import MINIMUM_CAPACITY

HOLDERS = [Holder(f"instance-{number}", number % 2) for number in range(6)]
holders = st.sampled_from(HOLDERS)
tiers = st.sampled_from(list(Tier))


@st.composite
def pieces(draw: st.DrawFn) -> np.ndarray:
    """A stretch of one of three chains that share their first four blocks."""
    start = draw(st.integers(0, 11))
    hashes = chain(draw(st.integers(0, 2)), 12)
    hashes[:4] = chain(99, 4)
    return hashes[start : draw(st.integers(start, 12))]


class IndexMachine(RuleBasedStateMachine):
    """Any sequence of changes leaves index and oracle with the same answers."""

    @initialize()
    def begin(self) -> None:
        self.both = Both()
        for holder in HOLDERS[:4]:
            self.both.register(holder)

    @rule(holder=holders)
    def register(self, holder: Holder) -> None:
        self.both.register(holder)

    @rule(holder=holders)
    def unregister(self, holder: Holder) -> None:
        self.both.unregister(holder)

    @rule(holder=holders, tier=tiers, hashes=pieces(), namespace=st.sampled_from([NAMESPACE, OTHER]))
    def store(self, holder: Holder, tier: Tier, hashes: np.ndarray, namespace: Namespace) -> None:
        if holder in self.both.plain.holders:
            self.both.store(holder, tier, hashes, namespace)

    @rule(holder=holders, tier=tiers, hashes=pieces(), namespace=st.sampled_from([NAMESPACE, OTHER]))
    def remove(self, holder: Holder, tier: Tier, hashes: np.ndarray, namespace: Namespace) -> None:
        self.both.remove(holder, tier, hashes, namespace)

    @rule(
        stretches=st.lists(st.tuples(holders, tiers, st.booleans(), pieces()), max_size=8),
        namespace=st.sampled_from([NAMESPACE, OTHER]),
    )
    def apply(self, stretches: list[tuple[Holder, Tier, bool, np.ndarray]], namespace: Namespace) -> None:
        self.both.apply([each for each in stretches if each[0] in self.both.plain.holders], namespace)

    @rule(holder=holders, tier=st.one_of(st.none(), tiers))
    def clear(self, holder: Holder, tier: Tier | None) -> None:
        self.both.clear(holder, tier)

    @rule(blocks=st.integers(0, 20_000))
    def expect(self, blocks: int) -> None:
        self.both.index.expect(blocks)

    @rule(positions=st.integers(1, 4096))
    def reclaim(self, positions: int) -> None:
        self.both.index.reclaim(positions)

    @rule()
    def save_and_load(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            self.both.save_and_load(Path(folder, "index"))

    @rule()
    def reclaim_everything(self) -> None:
        self.both.check_reclaimed()

    @rule(hashes=pieces(), namespace=st.sampled_from([NAMESPACE, OTHER]))
    def match(self, hashes: np.ndarray, namespace: Namespace) -> None:
        self.both.check_match(hashes, namespace)

    @invariant()
    def same_content(self) -> None:
        if hasattr(self, "both"):
            self.both.check_residencies()


TestIndexMachine = IndexMachine.TestCase
TestIndexMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize("seed", range(3))
def test_many_holders_long_chains(seed: int) -> None:
    """Sets cross from arrays to bitsets and back, tables and bitsets grow, slots are used again."""
    dice = random.Random(seed)
    both = Both()
    fleet = [Holder(f"h{number}") for number in range(150)]
    for holder in fleet:
        both.register(holder)
    chains = [chain(number, 60) for number in range(30)]
    for each in chains[1:]:
        each[:20] = chains[0][:20]
    for step in range(2500):
        holder, tier = dice.choice(fleet), Tier(dice.choice([0, 0, 0, 1, 3]))
        hashes = dice.choice(chains)
        action = dice.random()
        if action < 0.62:
            both.store(holder, tier, hashes[: dice.randrange(61)])
        elif action < 0.85:
            start = dice.randrange(60)
            both.remove(holder, tier, hashes[start : start + dice.choice([1, 1, 5, 60])])
        elif action < 0.90:
            both.clear(holder, dice.choice([None, tier]))
        elif action < 0.92:
            both.unregister(holder)
            both.register(holder)
        else:
            both.check_match(hashes[: dice.randrange(61)])
        if step % 500 == 0:
            both.check_residencies()
    both.check_residencies()
    for hashes in chains:
        both.check_match(hashes)
    both.check_reclaimed()
    for hashes in chains:
        both.check_match(hashes)
    for holder in fleet:
        both.clear(holder)
    both.check_reclaimed()
    assert both.index.stats().blocks == 0


def test_growth_keeps_everything() -> None:
    """Matches stay right at every moment of an incremental growth, removals included."""
    both = Both()
    first, second = Holder("a"), Holder("b")
    both.register(first)
    both.register(second)
    chains = [chain(number, 100) for number in range(3 * MINIMUM_CAPACITY // 100)]
    for number, hashes in enumerate(chains):
        both.store(first, Tier.DEVICE, hashes)
        both.store(second, Tier.HOST, hashes[:50])
        both.remove(first, Tier.DEVICE, chains[number // 2][70:71])
        if number % 20 == 7:
            both.clear(second)
        both.check_match(chains[number // 2])
        both.check_match(hashes)
    both.check_residencies()
    both.check_reclaimed()


def test_one_huge_chain() -> None:
    both = Both()
    both.register(Holder("a"))
    hashes = chain(1, 20_000)
    both.store(Holder("a"), Tier.DEVICE, hashes)
    both.check_match(hashes)
    both.remove(Holder("a"), Tier.DEVICE, hashes[15_000:15_001])
    both.check_match(hashes)


def test_same_tail_below_another_head_is_no_match() -> None:
    index = CacheIndex()
    first, second = Holder("w1"), Holder("w2")
    rows = [index.register(first), index.register(second)]
    head_1, head_2, tail_1, tail_2 = chain(1, 1), chain(2, 1), chain(3, 99), chain(4, 99)
    index.store(first, Tier.DEVICE, NAMESPACE, np.concatenate([head_1, tail_1]))
    index.store(second, Tier.DEVICE, NAMESPACE, np.concatenate([head_2, tail_2]))
    levels = index.match(NAMESPACE, np.concatenate([head_2, tail_1]))
    assert levels[rows[0]].tolist() == [0] * len(Tier)
    assert levels[rows[1]].tolist() == [1] * len(Tier)


def test_a_hole_ends_the_prefix() -> None:
    index = CacheIndex()
    row = index.register(Holder("w"))
    hashes = chain(1, 200)
    index.store(Holder("w"), Tier.DEVICE, NAMESPACE, hashes)
    index.remove(Holder("w"), Tier.DEVICE, NAMESPACE, hashes[10:11])
    assert index.match(NAMESPACE, hashes)[row].tolist() == [10] * len(Tier)


def test_tiers_complete_each_other() -> None:
    index = CacheIndex()
    row = index.register(Holder("w"))
    hashes = chain(1, 30)
    index.store(Holder("w"), Tier.DEVICE, NAMESPACE, hashes[:10])
    index.store(Holder("w"), Tier.HOST, NAMESPACE, hashes[5:20], parent=int(hashes[4]))
    index.store(Holder("w"), Tier.REMOTE, NAMESPACE, hashes[20:], parent=int(hashes[19]))
    assert index.match(NAMESPACE, hashes)[row].tolist() == [10, 20, 20, 20, 30]


def test_copies_are_counted_up_to_a_bound() -> None:
    index = CacheIndex()
    row = index.register(Holder("w"))
    hashes = chain(1, 3)
    for _ in range(MOST_COPIES + 5):
        index.store(Holder("w"), Tier.DEVICE, NAMESPACE, hashes)
    for _ in range(MOST_COPIES - 1):
        index.remove(Holder("w"), Tier.DEVICE, NAMESPACE, hashes)
    assert index.match(NAMESPACE, hashes)[row, 0] == 3
    index.remove(Holder("w"), Tier.DEVICE, NAMESPACE, hashes)
    assert index.match(NAMESPACE, hashes)[row, 0] == 0


def test_copies_go_with_the_slot() -> None:
    index = CacheIndex()
    row = index.register(Holder("w"))
    hashes = chain(1, 3)
    for _ in range(4):
        index.store(Holder("w"), Tier.DEVICE, NAMESPACE, hashes)
    index.clear(Holder("w"))
    while index.reclaim():
        pass
    index.store(Holder("w"), Tier.DEVICE, NAMESPACE, hashes)
    index.remove(Holder("w"), Tier.DEVICE, NAMESPACE, hashes)
    assert index.match(NAMESPACE, hashes)[row, 0] == 0


def test_a_row_given_away_carries_nothing_over() -> None:
    index = CacheIndex()
    row = index.register(Holder("old"))
    hashes = chain(1, 5)
    index.store(Holder("old"), Tier.DEVICE, NAMESPACE, hashes)
    index.unregister(Holder("old"))
    assert index.holder_id(Holder("old")) is None
    assert index.register(Holder("new")) == row
    assert not index.match(NAMESPACE, hashes).any()
    assert index.residencies(Holder("new")) == set()


def test_many_changes_at_once_leave_what_they_would_one_by_one() -> None:
    """Of long chains, so that room is made in the middle of a change; a chain goes on where it was left."""
    at_once, one_by_one = CacheIndex(), CacheIndex()
    random_ = random.Random(5)
    owners = [(holder, tier) for holder in HOLDERS for tier in (Tier.DEVICE, Tier.HOST)]
    for holder in HOLDERS:
        at_once.register(holder)
        one_by_one.register(holder)
    chains = np.concatenate([chain(number, 5_000) for number in range(8)])
    removed = np.concatenate([chain(number, 5_000)[::-1] for number in range(8)])
    rows = []
    for _ in range(300):
        first, stored = 5_000 * random_.randrange(8), random_.random() < 0.7
        start = first + random_.randrange(5_000)
        stop = start + random_.randrange(5_000 - (start - first))
        rows.append((random_.randrange(len(owners)), int(stored), start, stop, first))
    at_once.apply(owners, NAMESPACE, Changes(np.array(rows, np.int64), chains, removed))
    for owner, stored, start, stop, first in rows:
        holder, tier = owners[owner]
        if stored:
            parent = int(chains[start - 1]) if start > first else 0
            one_by_one.store(holder, tier, NAMESPACE, chains[start:stop], parent=parent)
        else:
            one_by_one.remove(holder, tier, NAMESPACE, removed[start:stop])
    for number in range(8):
        hashes = chain(number, 5_000)
        assert (at_once.match(NAMESPACE, hashes) == one_by_one.match(NAMESPACE, hashes)).all()
    for holder in HOLDERS:
        assert at_once.residencies(holder) == one_by_one.residencies(holder)
    assert at_once.stats().blocks == one_by_one.stats().blocks > MINIMUM_CAPACITY
    trees = (each.tree(limit=40_000).nodes for each in (at_once, one_by_one))
    mine, theirs = ({(n.hash, n.parent, n.depth, frozenset(n.holders)) for n in nodes} for nodes in trees)
    assert mine == theirs


def test_changes_of_unknown_holders_change_nothing() -> None:
    index = CacheIndex()
    index.register(HOLDERS[0])
    hashes = chain(1, 4)
    changes = Changes(np.array([(0, 1, 0, 4, 0)], np.int64), hashes, hashes[:0])
    with pytest.raises(UnknownHolderError):
        index.apply([(HOLDERS[0], Tier.DEVICE), (HOLDERS[1], Tier.DEVICE)], NAMESPACE, changes)
    assert index.stats().residencies == 0


def test_unknown_holders() -> None:
    index = CacheIndex()
    with pytest.raises(UnknownHolderError):
        index.store(Holder("w"), Tier.DEVICE, NAMESPACE, chain(1, 5))
    index.remove(Holder("w"), Tier.DEVICE, NAMESPACE, chain(1, 5))
    index.clear(Holder("w"))
    index.unregister(Holder("w"))
    assert index.residencies(Holder("w")) == set()
    assert index.match(NAMESPACE, chain(1, 5)).shape == (0, len(Tier))


def test_register_is_idempotent() -> None:
    index = CacheIndex()
    assert index.register(Holder("w", 1)) == index.register(Holder("w", 1)) == index.holder_id(Holder("w", 1))
    assert index.register(Holder("w", 2)) != index.holder_id(Holder("w", 1))


def test_the_tree_shows_parents_depths_and_holders() -> None:
    index = CacheIndex()
    index.register(Holder("a"))
    index.register(Holder("b"))
    index.register(Holder("gone"))
    hashes = chain(1, 4)
    keys = [each ^ NAMESPACE.domain for each in hashes.tolist()]
    index.store(Holder("a"), Tier.DEVICE, NAMESPACE, hashes)
    index.store(Holder("b"), Tier.HOST, NAMESPACE, hashes[:1])
    index.store(Holder("gone"), Tier.DEVICE, NAMESPACE, chain(2, 4))
    index.store(Holder("b"), Tier.HOST, NAMESPACE, chain(3, 1), parent=12345)
    index.unregister(Holder("gone"))
    nodes = index.tree().nodes
    assert [node.hash for node in nodes[:4]] == keys
    assert [node.parent for node in nodes[:4]] == [None, *keys[:3]]
    assert [node.depth for node in nodes] == [0, 1, 2, 3, None]
    assert {*nodes[0].holders} == {(Holder("a"), Tier.DEVICE), (Holder("b"), Tier.HOST)}
    assert nodes[3].holders == ((Holder("a"), Tier.DEVICE),)
    assert [node.hash for node in index.tree(limit=2).nodes] == keys[:2]
    assert index.tree(limit=0).nodes == []


def test_an_orphan_gets_its_depth_when_its_chain_is_stored() -> None:
    index = CacheIndex()
    index.register(Holder("a"))
    hashes = chain(1, 4)
    index.store(Holder("a"), Tier.DEVICE, NAMESPACE, hashes[2:], parent=int(hashes[1]))
    assert {node.depth for node in index.tree().nodes} == {None}
    index.store(Holder("a"), Tier.DEVICE, NAMESPACE, hashes)
    assert [node.depth for node in index.tree().nodes] == [0, 1, 2, 3]


def test_linked_blocks_are_found_by_engine_key_until_they_are_gone() -> None:
    index = CacheIndex()
    index.register(Holder("a"))
    hashes, engine_keys = chain(1, 4), chain(2, 4)
    index.store_linked(Holder("a"), Tier.DEVICE, NAMESPACE, hashes, engine_keys)
    assert index.resolve(int(engine_keys[2]), NAMESPACE) == int(hashes[2])
    assert index.remove_linked(Holder("a"), Tier.DEVICE, engine_keys[2:3]) == 0
    assert index.resolve(int(engine_keys[2]), NAMESPACE) is None
    assert index.remove_linked(Holder("a"), Tier.DEVICE, engine_keys[2:]) == 1


def test_links_of_cleared_holders_are_reclaimed() -> None:
    index = CacheIndex()
    index.register(Holder("a"))
    for round_number in range(50):
        engine_keys = chain(1000 + round_number, 400)
        index.store_linked(Holder("a"), Tier.DEVICE, NAMESPACE, chain(round_number, 400), engine_keys)
        index.clear(Holder("a"))
        while index.reclaim():
            pass
    before = index.stats().bytes
    assert index.resolve(int(engine_keys[0]), NAMESPACE) is None
    assert before < 2_000_000


def test_threads_may_store_and_match_at_once() -> None:
    index = CacheIndex()
    fleet = [Holder(f"h{number}") for number in range(4)]
    rows = [index.register(holder) for holder in fleet]
    shared = chain(1, 200)
    errors: list[BaseException] = []

    def work(holder: Holder, seed: int) -> None:
        try:
            for step in range(60):
                index.store(holder, Tier.DEVICE, NAMESPACE, shared)
                index.store(holder, Tier.HOST, NAMESPACE, chain(1000 + seed * 100 + step, 50))
                assert index.match(NAMESPACE, shared)[index.holder_id(holder), 0] == 200  # type: ignore[index]
                index.remove(holder, Tier.DEVICE, NAMESPACE, shared)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(holder, seed)) for seed, holder in enumerate(fleet)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert not index.match(NAMESPACE, shared)[rows].any()
    assert index.stats().residencies == 4 * 60 * 50
