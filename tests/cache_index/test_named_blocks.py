"""Blocks that a source names, against a plain dictionary of names and tiers."""

from __future__ import annotations

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from index_oracle import chain

from cache_index import CacheIndex, Holder, Namespace, Tier
from cache_index.named_blocks import NamedBlocks

HOLDER = Holder("h")
NAMESPACES = (Namespace("m", 4), Namespace("m", 4, "adapter"))
CHAINS = [chain(number, 8) for number in range(3)]
tiers = st.sampled_from(list(Tier))


class NamedBlocksMachine(RuleBasedStateMachine):
    """Names are numbers; the same name may be given to another block, or to one in another namespace."""

    def __init__(self) -> None:
        super().__init__()
        self.index = CacheIndex()
        self.index.register(HOLDER)
        self.blocks = NamedBlocks(self.index, HOLDER)
        self.model: dict[int, tuple[int, set[Tier]]] = {}  # name -> (key, tiers)

    @rule(
        number=st.integers(0, 2),
        start=st.integers(0, 6),
        count=st.integers(1, 4),
        shift=st.integers(0, 1),
        which=st.integers(0, 1),
        tier=tiers,
    )
    def store(self, number: int, start: int, count: int, shift: int, which: int, tier: Tier) -> None:
        hashes, namespace = CHAINS[number][start : start + count], NAMESPACES[which]
        names = [100 * number + shift + i for i in range(start, start + len(hashes))]
        parent = int(CHAINS[number][start - 1]) if start else 0
        # two names of one block in one tier would count as two copies, which sources do not do
        keys = {key for key, _ in (self.model[name] for name in self.model if name not in names)}
        if keys & {value ^ namespace.domain for value in hashes.tolist()}:
            return
        self.blocks.store(names, tier, namespace, hashes, parent=parent)
        for name, value in zip(names, hashes.tolist(), strict=True):
            key, known = self.model.get(name, (value ^ namespace.domain, set[Tier]()))
            if key != value ^ namespace.domain:
                key, known = value ^ namespace.domain, set()
            self.model[name] = (key, known | {tier})

    @rule(name=st.integers(0, 210), tier=st.none() | tiers)
    def remove(self, name: int, tier: Tier | None) -> None:
        unknown = self.blocks.remove([name], tier)
        assert unknown == (name not in self.model)
        if name in self.model:
            key, known = self.model.pop(name)
            left = known - (set(Tier) if tier is None else {tier})
            if left:
                self.model[name] = (key, left)

    @rule(name=st.integers(0, 210), tier=tiers)
    def move(self, name: int, tier: Tier) -> None:
        assert self.blocks.move(name, tier) == (name in self.model)
        if name in self.model:
            self.model[name] = (self.model[name][0], {tier})

    @rule(tier=st.none() | tiers)
    def clear(self, tier: Tier | None) -> None:
        self.blocks.clear(tier)
        left = {name: (key, known - {tier}) for name, (key, known) in self.model.items()}
        self.model = {} if tier is None else {name: entry for name, entry in left.items() if entry[1]}

    @rule(cleared=st.booleans())
    def restore(self, cleared: bool) -> None:
        if cleared:
            self.index.clear(HOLDER)
        self.blocks.restore()

    @invariant()
    def the_index_says_the_same(self) -> None:
        expected = {(key, tier) for key, known in self.model.values() for tier in known}
        assert self.index.residencies(HOLDER) == expected
        assert {*self.blocks} == self.model.keys() and len(self.blocks) == len(self.model)


NamedBlocksMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
TestNamedBlocks = NamedBlocksMachine.TestCase


def test_what_others_told_of_a_tier_is_not_touched() -> None:
    index = CacheIndex()
    index.register(HOLDER)
    index.store(HOLDER, Tier.DEVICE, NAMESPACES[0], CHAINS[0])
    blocks = NamedBlocks(index, HOLDER)
    blocks.store([1, 2], Tier.REMOTE, NAMESPACES[0], CHAINS[0][:2])
    blocks.restore()
    blocks.clear()
    assert index.stats().residencies_by_holder[HOLDER] == {Tier.DEVICE: len(CHAINS[0])}


def test_a_chain_is_restored_with_its_parents() -> None:
    index = CacheIndex()
    index.register(HOLDER)
    blocks = NamedBlocks(index, HOLDER)
    blocks.store([1, 2, 3], Tier.DEVICE, NAMESPACES[0], CHAINS[0][:3])
    blocks.store([4], Tier.DEVICE, NAMESPACES[0], CHAINS[0][3:4], parent=int(CHAINS[0][2]))
    index.clear(HOLDER)
    while index.reclaim():
        pass
    blocks.restore()
    assert [node.depth for node in index.tree().nodes] == [0, 1, 2, 3]
    assert np.array_equal(index.match(NAMESPACES[0], CHAINS[0])[0], [4] * len(Tier))
