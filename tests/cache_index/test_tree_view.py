"""Views of the radix tree: from the roots and below a block, of tables of many pages too."""

from __future__ import annotations

import numpy as np
import pytest
from index_oracle import chain

from cache_index import CacheIndex, Holder, Namespace, Tier, tree_view
from cache_index.residency import TreeNode

A, B = Holder("a"), Holder("b", 1)
NAMESPACE = Namespace("model", 16)


def keys_of(hashes: np.ndarray) -> list[int]:
    return [each ^ NAMESPACE.domain for each in hashes.tolist()]


@pytest.fixture
def forked() -> tuple[CacheIndex, np.ndarray, list[np.ndarray]]:
    """A trunk of 300 blocks and three branches of it: from blocks 100, 200 and 299."""
    index = CacheIndex()
    trunk, branches = chain(1, 300), [chain(2 + i, 40) for i in range(3)]
    index.register(A)
    index.register(B)
    index.store(A, Tier.DEVICE, NAMESPACE, trunk)
    for branch, at in zip(branches, (100, 200, 299), strict=True):
        index.store(B, Tier.HOST, NAMESPACE, branch, parent=int(trunk[at]))
    return index, trunk, branches


def test_below_a_block_stand_all_that_continue_it(
    forked: tuple[CacheIndex, np.ndarray, list[np.ndarray]],
) -> None:
    index, trunk, branches = forked
    keys = keys_of(trunk)
    view = index.subtree(keys[150], limit=1000)
    assert view is not None and not view.sampled
    expected = {*keys[150:], *keys_of(branches[1]), *keys_of(branches[2])}
    assert {node.hash for node in view.nodes} == expected and len(view.nodes) == len(expected)
    depths = [node.depth for node in view.nodes]
    assert depths == sorted(depths) and depths[0] == 150
    by_hash = {node.hash: node for node in view.nodes}
    first = by_hash[keys_of(branches[1])[0]]
    assert (first.parent, first.depth, first.holders) == (keys[200], 201, ((B, Tier.HOST),))


def test_the_nearest_come_first_and_an_end_has_nothing_below(
    forked: tuple[CacheIndex, np.ndarray, list[np.ndarray]],
) -> None:
    index, trunk, branches = forked
    keys = keys_of(trunk)
    view = index.subtree(keys[199], limit=4)
    assert view is not None
    assert [node.hash for node in view.nodes[:2]] == keys[199:201]
    assert {node.hash for node in view.nodes[2:]} == {keys[201], keys_of(branches[1])[0]}
    last = index.subtree(keys_of(branches[0])[-1])
    assert last is not None and [node.depth for node in last.nodes] == [140]
    assert index.subtree(12345) is None


def test_a_block_of_unknown_depth_stands_alone() -> None:
    index = CacheIndex()
    index.register(A)
    orphans = chain(5, 4)
    index.store(A, Tier.DEVICE, NAMESPACE, orphans, parent=99)
    view = index.subtree(keys_of(orphans)[0])
    assert view is not None
    assert view.nodes == [TreeNode(keys_of(orphans)[0], None, None, ((A, Tier.DEVICE),))]


def test_tables_of_many_pages_are_read_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree_view, "PAGE_POSITIONS", 1 << 10)
    monkeypatch.setattr(tree_view, "FIRST_LEVELS", 2)
    index = CacheIndex()
    index.register(A)
    chains = [chain(10 + i, 37) for i in range(400)]
    for each in chains:
        index.store(A, Tier.DEVICE, NAMESPACE, each)
    index._arrays.finish_growth()
    view = index.tree(limit=2000)
    assert not view.sampled
    expected = [key for depth in range(5) for key in sorted(keys_of(each)[depth] for each in chains)]
    assert [node.hash for node in sorted(view.nodes, key=lambda n: (n.depth, n.hash))] == expected
    below = index.subtree(keys_of(chains[7])[3], limit=100)
    assert below is not None and [node.hash for node in below.nodes] == keys_of(chains[7])[3:]


def test_a_subtree_among_many_blocks_of_the_same_depths_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree_view, "MOST_READ", 500)
    index = CacheIndex()
    index.register(A)
    chains = [chain(10 + i, 60) for i in range(100)]
    for each in chains:
        index.store(A, Tier.DEVICE, NAMESPACE, each)
    view = index.subtree(keys_of(chains[42])[0], limit=1000)
    assert view is not None and not view.sampled
    assert [node.hash for node in view.nodes] == keys_of(chains[42])
    monkeypatch.setattr(tree_view, "MOST_READ", 50)  # not even one level can be read
    view = index.subtree(keys_of(chains[42])[0], limit=1000)
    assert view is not None and view.sampled


def test_a_view_of_a_table_that_is_moving_says_that_it_is_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree_view, "PAGE_POSITIONS", 1 << 10)
    index = CacheIndex()
    index.register(A)
    number = 0
    while not (index._arrays.growing and index.tree(limit=1).sampled):
        number += 1
        assert number < 5000, "the table never grew"
        index.store(A, Tier.DEVICE, NAMESPACE, chain(number, 16))
    index._arrays.finish_growth()
    assert not index.tree(limit=1).sampled
