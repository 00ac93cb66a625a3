"""Sums over a sliding window, against a list of what was added."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from conductor.policies.work_window import WorkWindow


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(0, 50), st.integers(0, 5), st.integers(0, 9)), max_size=40))
def test_what_is_older_than_the_window_is_gone_and_the_rest_is_there(
    steps: list[tuple[float, int, int]],
) -> None:
    window, added, now_s = WorkWindow(60.0, amounts=2), [], 0.0
    rows = np.arange(6)
    for pause_s, row, amount in steps:
        now_s += pause_s
        window.add(now_s, row, amount, 1)
        added.append((now_s, row, amount))
        sums = window.sums(now_s, rows)
        for r in rows:
            # A slice is a second: what is 59 to 60 s old may be gone already.
            surely = sum(a for t, at, a in added if at == r and now_s - t < 59.0)
            perhaps = sum(a for t, at, a in added if at == r and now_s - t <= 60.0)
            assert surely - 1e-6 <= sums[0, r] <= perhaps + 1e-6


def test_time_alone_empties_it() -> None:
    window = WorkWindow(60.0, amounts=1)
    window.add(5.0, 3, 7.0)
    assert window.sums(1e6, np.array([3])).tolist() == [[0.0]]
