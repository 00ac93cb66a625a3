"""What a site is taken to have, against looking at all of it."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cache_index import Namespace
from conductor.actions import Prefix
from conductor.tier_planner.contents import SiteContents
from conductor.tier_planner.prefix_tree import PrefixTree, Segment

NAMESPACE = Namespace("m", 16)


def prefix(text: str) -> Prefix:
    """A block per letter; its hash names the text up to there."""
    hashes = [hash(text[: end + 1]) & (2**64 - 1) for end in range(len(text))]
    return Prefix(NAMESPACE, np.array(hashes, np.uint64))


# A prompt, the site that it goes to, and what is dropped of a site afterwards.
STEPS = st.lists(
    st.tuples(
        st.text("ab", min_size=1, max_size=6), st.integers(0, 1), st.lists(st.integers(0, 50), max_size=2)
    ),
    max_size=40,
)


@given(STEPS, st.integers(1, 30))
def test_ends_are_what_nothing_is_behind(steps: list[tuple[str, int, list[int]]], capacity: int) -> None:
    """Also where what was before an end has been lost, comes back, or is parted; and of what the tree forgets."""
    tree = PrefixTree(capacity)
    sites = [SiteContents(number) for number in range(2)]
    for now_s, (text, number, dropped) in enumerate(steps):
        path = tree.use(prefix(text), float(now_s))
        for first in tree.parted():
            for site in sites:
                if site.number in first.held_at:
                    site.parted(first, first.held_at[site.number])
        sites[number].put(path, now_s + 1.0)
        for segment in tree.shrink():
            for site in sites:
                site.drop(segment)
        for each in dropped:
            stays = list(sites[number].stays)
            if stays:
                sites[number].drop(stays[each % len(stays)])
        for site in sites:
            with_more = {segment.parent for segment in site.stays}
            assert set(site.ends) == {segment for segment in site.stays if segment not in with_more}
            for segment, stay in site.stays.items():
                assert segment.held_at[site.number] is stay
                assert segment not in site.ends or site.ends[segment] is stay
            held = [segment for segment in tree if site.number in segment.held_at]
            assert set(held) == set(site.stays), "nothing else says that it is there"
        for segment in path:
            stay = sites[number].stays.get(segment)
            assert stay is None or (stay.last_used_s, stay.held_until_s) == (now_s, now_s + 1.0)


def test_parts_of_a_segment_are_held_each_by_itself() -> None:
    tree, site = PrefixTree(), SiteContents(0)
    site.put(tree.use(prefix("system one"), 1.0), 5.0)
    path = tree.use(prefix("system two"), 2.0)
    (first,) = tree.parted()
    site.parted(first, first.held_at[0])
    site.put(path[:1], 9.0)
    second: Segment = next(segment for segment in site.stays if segment is not first)
    assert (site.stays[first].last_used_s, site.stays[first].held_until_s) == (2.0, 9.0)
    assert (site.stays[second].last_used_s, site.stays[second].held_until_s) == (1.0, 5.0)
