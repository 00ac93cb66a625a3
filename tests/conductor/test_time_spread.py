"""Percentiles of counted times, against those of the times themselves."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conductor.time_spread import magnitude, percentile

times = st.lists(st.floats(1e-4, 1e4), min_size=1, max_size=200)


@given(times, st.sampled_from((0.5, 0.9, 0.99, 1.0)))
def test_within_two_and_a_half_percent(seconds: list[float], share: float) -> None:
    told = percentile(Counter(map(magnitude, seconds)), share)
    true = sorted(seconds)[math.ceil(share * len(seconds)) - 1]
    assert told == pytest.approx(true, rel=0.0253)


def test_nothing_and_next_to_nothing() -> None:
    assert percentile({}, 0.5) is None
    assert percentile(Counter(map(magnitude, (0.0, 1e-9))), 0.99) == 1e-4
