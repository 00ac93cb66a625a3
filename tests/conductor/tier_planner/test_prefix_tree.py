"""The tree of remembered prompts against a plain set of all their beginnings."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_index import Namespace
from conductor.actions import Prefix
from conductor.tier_planner.prefix_tree import PrefixTree, Segment

NAMESPACE = Namespace("m", 16)


def prefix(text: str, namespace: Namespace = NAMESPACE) -> Prefix:
    """A block per letter; its hash names the text up to there."""
    hashes = [hash(text[: end + 1]) & (2**64 - 1) for end in range(len(text))]
    return Prefix(namespace, np.array(hashes, np.uint64))


def shape(path: list[Segment]) -> list[tuple[int, int, int]]:
    return [(segment.start, segment.stop, segment.uses) for segment in path]


def test_a_turn_adds_a_segment_and_prompts_part_where_they_differ() -> None:
    tree = PrefixTree()
    assert shape(tree.use(prefix("system one"), 1.0)) == [(0, 10, 1)]
    assert shape(tree.use(prefix("system one two"), 2.0)) == [(0, 10, 2), (10, 14, 1)]
    path = tree.use(prefix("system six"), 5.0)
    assert shape(path) == [(0, 7, 3), (7, 10, 1)]
    assert (path[0].gap_s, path[1].gap_s) == (3.0, None)
    assert [segment.start for segment in path[1].path()] == [7, 0]
    assert shape(tree.use(prefix("system one"), 6.0)) == [(0, 7, 4), (7, 10, 3)]


def test_namespaces_are_apart() -> None:
    tree = PrefixTree()
    tree.use(prefix("same"), 0.0)
    assert shape(tree.use(prefix("same", Namespace("other", 16)), 1.0)) == [(0, 4, 1)]


def test_ends_go_before_beginnings_and_the_longest_unused_first() -> None:
    tree = PrefixTree(capacity=3)
    tree.use(prefix("ab"), 0.0)
    tree.use(prefix("abc"), 1.0)
    tree.use(prefix("xy"), 2.0)
    assert tree.shrink() == []
    tree.use(prefix("abd"), 3.0)
    assert [(s.start, s.stop, s.last_used_s) for s in tree.shrink()] == [(2, 3, 1.0)]
    tree.use(prefix("z"), 4.0)
    assert [(s.start, s.stop, s.last_used_s) for s in tree.shrink()] == [(0, 2, 2.0)]
    assert shape(tree.use(prefix("abd"), 5.0)) == [(0, 2, 4), (2, 3, 2)]


def test_nothing_is_left_of_a_tree_and_the_garbage_collector_need_not_look_through_it() -> None:
    tree = PrefixTree()
    prompts = [prefix(text) for text in ("system one", "system one two", "system six", "else")]
    for prompt in prompts:
        tree.use(prompt, 0.0)
    assert not any(gc.is_tracked(segment) or gc.is_tracked(segment.children) for segment in tree)
    hashes = [weakref.ref(prompt.hashes) for prompt in prompts]
    del prompts, prompt, tree
    assert [each() for each in hashes] == [None] * len(hashes)


def test_a_tree_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="capacity"):
        PrefixTree(capacity=0)


texts = st.text("ab", min_size=0, max_size=12)


@given(prompts=st.lists(texts, max_size=30), capacity=st.integers(1, 20))
def test_it_knows_what_a_set_of_beginnings_knows(prompts: list[str], capacity: int) -> None:
    tree, known = PrefixTree(capacity), dict[str, float]()
    for now_s, text in enumerate(prompts):
        path = tree.use(prefix(text), float(now_s))
        assert [segment.start for segment in path[1:]] == [segment.stop for segment in path[:-1]]
        assert (path[-1].stop if path else 0) == len(text)
        for segment in path:
            seen = text[: segment.stop] in known
            assert (segment.uses > 1) == seen
            assert segment.key == prefix(text).hashes[segment.stop - 1]
        known |= {text[: end + 1]: float(now_s) for end in range(len(text))}
        for segment in tree.shrink():
            assert not segment.children
            assert all(segment.last_used_s <= other.last_used_s for other in tree)
            known = {
                text: at_s
                for text, at_s in known.items()
                if len(text) <= segment.start or prefix(text).hashes[segment.start] not in _firsts(segment)
            }
        assert len(tree) <= capacity
        for segment in tree:
            assert segment.parent is None or segment.parent in tree


def _firsts(segment: Segment) -> set[int]:
    return {segment.prefix.hashes.item(segment.start)}
