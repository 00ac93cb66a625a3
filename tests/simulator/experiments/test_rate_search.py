"""The highest rate that is served well."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulated_points import small_points

from simulator.experiments.rate_search import highest_rate
from simulator.experiments.runs import run_point


@given(first_guess=st.floats(0.05, 1e3), doublings=st.floats(-11.9, 11.9))
def test_finds_the_limit_from_below(first_guess: float, doublings: float) -> None:
    limit = first_guess * 2.0**doublings
    tried: list[float] = []

    def serves(rate: float) -> bool:
        tried.append(rate)
        return rate <= limit

    found = highest_rate(serves, first_guess)
    assert found is not None and found in tried
    assert limit / 1.0201 <= found <= limit
    assert len(tried) == len(set(tried)) < 40


def test_gives_up_where_no_rate_is_served_or_every_rate_is() -> None:
    assert highest_rate(lambda rate: False, 1.0) is None
    assert highest_rate(lambda rate: True, 1.0) == 2.0**12


def test_the_figures_are_those_at_that_rate() -> None:
    (point,) = small_points(clusters=("1",), policies=("slo",), rates=(1.0,), good_share=0.9)
    figures = run_point(point)
    assert figures["good_request_fraction"] >= 0.9
    tried = dict(figures["rates_tried"])
    assert tried[figures["highest_rate"]] == figures["good_request_fraction"]
    missed = [rate for rate, share in tried.items() if share < 0.9]
    assert min(missed) == pytest.approx(figures["highest_rate"], rel=0.021)


def test_bounds_are_of_the_rate_found() -> None:
    (point,) = small_points(clusters=("1",), policies=("slo",), rates=(1.0,), good_share=0.9)
    plain, bounded = run_point(point), run_point(replace(point, with_bounds=True))
    assert bounded["bounds"] is not None and plain["bounds"] is None
    assert bounded["highest_rate"] == plain["highest_rate"]
    assert bounded["time_to_first_token"] == plain["time_to_first_token"]


def test_objectives_that_no_rate_meets_are_told() -> None:
    (point,) = small_points(clusters=("1",), policies=("slo",), rates=(1.0,), good_share=0.9)
    objectives = point.scheduling.objectives.model_copy(update={"ttft_s": 1e-6})
    hopeless = point.scheduling.model_copy(update={"objectives": objectives})
    figures = run_point(replace(point, scheduling=hopeless))
    assert figures["highest_rate"] is None
    assert figures["good_request_fraction"] == 0.0
