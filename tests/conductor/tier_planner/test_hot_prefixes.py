"""Uses that fade: the same figures as when each is weighed by its age."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_index import Namespace
from conductor.actions import Prefix
from conductor.tier_planner.hot_prefixes import LEAST_USES, MEMORY_S, HotPrefixes
from conductor.tier_planner.prefix_tree import Segment

PREFIX = Prefix(Namespace("llama", 16), np.arange(1, 5, dtype=np.uint64))


def hot_segment() -> Segment:
    segment = Segment(None, PREFIX, 0, 4, 0.0)
    segment.uses = LEAST_USES
    return segment


@given(
    begun_s=st.sampled_from([0.0, 1e9]),
    uses=st.lists(
        st.tuples(st.sampled_from([0.1, 30.0, 900.0, 1e6]), st.booleans()), min_size=1, max_size=20
    ),
)
def test_uses_count_less_the_older_they_are(begun_s: float, uses: list[tuple[float, bool]]) -> None:
    hot, segment, now_s = HotPrefixes(), hot_segment(), begun_s
    at: list[tuple[float, bool]] = []
    for pause_s, missed in uses:
        now_s += pause_s
        hot.used([segment], 3 if missed else 4, now_s)
        at.append((now_s, missed))
        weights = [math.exp((used_s - now_s) / MEMORY_S) for used_s, _ in at]
        ((found, rate, share),) = hot.now(now_s)
        assert found is segment
        assert rate == pytest.approx(sum(weights) / MEMORY_S)
        assert share == pytest.approx(
            sum(w for w, (_, m) in zip(weights, at, strict=True) if m) / sum(weights)
        )
    assert list(hot.now(now_s + 10 * MEMORY_S)) == []


def test_the_least_used_are_forgotten_when_there_are_many() -> None:
    hot = HotPrefixes(capacity=4)
    segments = [hot_segment() for _ in range(5)]
    for number, segment in enumerate(segments):
        for _ in range(5 - number):
            hot.used([segment], 4, 1.0)
    assert {segment for segment, _, _ in hot.now(1.0)} == set(segments[:-1])
    assert [segment for segment, _, _ in hot.now(1.0, 3.5 / MEMORY_S)] == segments[1::-1]
