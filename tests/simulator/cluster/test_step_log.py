"""The log of steps against a plain list."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.cluster.step_log import StepLog, longest_tenth_s

RUN = st.tuples(st.integers(1, 30), st.floats(0.001, 1.0), st.floats(0.0, 0.01))


@given(st.lists(RUN, min_size=1, max_size=30), st.data())
def test_gaps_are_those_of_the_runs(runs: list[tuple[int, float, float]], data: st.DataObject) -> None:
    log = StepLog()
    start = data.draw(st.integers(0, len(runs)))
    for number, run in enumerate(runs):
        if data.draw(st.booleans()):
            log.forget(min(number, start))
        assert log.end == number
        log.add(*run)
    expected = [first + growth * i for count, first, growth in runs[start:] for i in range(count)]
    assert log.gaps_s(start).tolist() == pytest.approx(expected)


def test_it_grows_and_forgets() -> None:
    log = StepLog()
    while not log.full:
        log.add(1, 1.0, 0.0)
    log.add(2, 2.0, 0.5)
    log.forget(log.end - 2)
    assert log.gaps_s(log.end - 2).tolist() == [1.0, 2.0, 2.5]


@pytest.mark.parametrize(("gaps", "expected"), [(1, 1.0), (10, 10.0), (11, 10.5), (30, 29.0)])
def test_longest_tenth(gaps: int, expected: float) -> None:
    values = np.random.default_rng(0).permutation(np.arange(1.0, gaps + 1))
    assert longest_tenth_s(values) == expected
