"""Observed seconds are counted in the bucket that they belong to, whenever they are put there."""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.metrics import REQUEST_BUCKETS_S, Distribution

seconds = st.one_of(st.floats(0, 1_000), st.sampled_from(REQUEST_BUCKETS_S))


@given(st.lists(st.lists(seconds, max_size=20), max_size=5))
def test_all_are_counted_once(turns: list[list[float]]) -> None:
    distribution = Distribution(REQUEST_BUCKETS_S)
    counts = [0] * (len(REQUEST_BUCKETS_S) + 1)
    for turn in turns:
        for each in turn:
            distribution.observe(each)
            counts[bisect_left(REQUEST_BUCKETS_S, each)] += 1
        distribution.settle()
    distribution.observe(0.25)
    counts[bisect_left(REQUEST_BUCKETS_S, 0.25)] += 1
    for _ in range(2):
        samples = distribution.family("d", "seconds").samples
        assert [s.value for s in samples if s.name == "d_bucket"] == list(accumulate(counts))
        total = next(s.value for s in samples if s.name == "d_sum")
        assert total == pytest.approx(0.25 + sum(map(sum, turns)))
