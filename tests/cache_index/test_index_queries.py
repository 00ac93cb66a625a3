"""Questions beyond matching: who has most of a range, and what is hot."""

from __future__ import annotations

import numpy as np
from index_oracle import NAMESPACE, chain

from cache_index import CacheIndex, Holder, Tier
from cache_index.residency import HeldRange

A, B, C = Holder("a"), Holder("b"), Holder("c")


def index_of_three() -> CacheIndex:
    index = CacheIndex()
    for holder in (A, B, C):
        index.register(holder)
    return index


def test_the_best_holder_of_a_range() -> None:
    index = index_of_three()
    hashes = chain(1, 100)
    index.store(A, Tier.DEVICE, NAMESPACE, hashes[:40])
    index.store(B, Tier.HOST, NAMESPACE, hashes[:70])
    index.store(C, Tier.DEVICE, NAMESPACE, hashes[50:90], parent=int(hashes[49]))
    best = index.best_holder(NAMESPACE, hashes)
    assert best[Tier.DEVICE] == HeldRange(A, 40)
    assert best[Tier.HOST] == best[Tier.REMOTE] == HeldRange(B, 70)
    best = index.best_holder(NAMESPACE, hashes, 55, 80)
    assert best[Tier.DEVICE] == HeldRange(C, 25)
    assert index.best_holder(NAMESPACE, hashes, 95) == {}
    assert Tier.DEVICE not in index.best_holder(NAMESPACE, hashes, 42, 45)
    assert index.best_holder(NAMESPACE, hashes, 10, 10) == {}
    assert CacheIndex().best_holder(NAMESPACE, hashes) == {}


def test_what_one_holder_has_of_a_range() -> None:
    index = index_of_three()
    hashes = chain(1, 100)
    index.store(A, Tier.DEVICE, NAMESPACE, hashes[20:60], parent=int(hashes[19]))
    index.store(A, Tier.HOST, NAMESPACE, hashes[60:70], parent=int(hashes[59]))
    index.store(B, Tier.DEVICE, NAMESPACE, hashes)
    assert index.held_run(A, Tier.DEVICE, NAMESPACE, hashes) == 0
    assert index.held_run(A, Tier.DEVICE, NAMESPACE, hashes[20:]) == 40
    assert index.held_run(A, Tier.HOST, NAMESPACE, hashes[30:]) == 40
    assert index.held_run(A, Tier.HOST, NAMESPACE, hashes[30:50]) == 20
    assert index.held_run(B, Tier.REMOTE, NAMESPACE, hashes) == 100
    assert index.held_run(C, Tier.REMOTE, NAMESPACE, hashes) == 0
    assert index.held_run(Holder("nobody"), Tier.REMOTE, NAMESPACE, hashes) == 0
    assert index.held_run(A, Tier.HOST, NAMESPACE, hashes[30:], alone=True) == 0
    assert index.held_run(A, Tier.HOST, NAMESPACE, hashes[60:], alone=True) == 10
    assert index.held_run(A, Tier.DEVICE, NAMESPACE, hashes[20:], alone=True) == 40
    index.clear(A, Tier.DEVICE)
    assert index.held_run(A, Tier.HOST, NAMESPACE, hashes[60:]) == 10


def test_how_much_each_holder_has() -> None:
    index = index_of_three()
    index.store(A, Tier.DEVICE, NAMESPACE, chain(1, 30))
    index.store(B, Tier.HOST, NAMESPACE, chain(1, 20))
    _, rows = index.registered()
    asked = [(A, Tier.DEVICE), (A, Tier.HOST), (B, Tier.HOST), (C, Tier.DEVICE)]
    counts = index.held_counts(
        np.array([rows[h] for h, _ in asked] + [-1]), np.array([t for _, t in asked] + [0])
    )
    assert counts.tolist() == [*(index.held_blocks(*each) for each in asked), 0] == [30, 0, 20, 0, 0]


def test_hot_prefixes() -> None:
    index = index_of_three()
    system, other = chain(1, 30), chain(2, 10)
    index.store(A, Tier.DEVICE, NAMESPACE, system)
    index.store(B, Tier.DEVICE, NAMESPACE, system)
    index.store(B, Tier.DEVICE, NAMESPACE, other)
    for number in range(20):
        index.match(NAMESPACE, np.concatenate([system, chain(10 + number, 5)]))
    index.match(NAMESPACE, other)
    first, second = index.hot_prefixes()
    assert (first.hash, first.parent) == tuple(each ^ NAMESPACE.domain for each in system[[29, 28]].tolist())
    assert (first.depth, first.matches, first.holders) == (29, 20, 2)
    assert (second.hash, second.matches, second.holders) == (int(other[-1]) ^ NAMESPACE.domain, 1, 1)
    assert index.hot_prefixes(limit=1) == [first]
    index.clear(A)
    index.clear(B)
    while index.reclaim():
        pass
    assert index.hot_prefixes() == []
