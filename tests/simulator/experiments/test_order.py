"""Whether figures come in the order that a source has them in."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulated_points import small_points

from simulator.experiments.experiment_file import Experiment
from simulator.experiments.order import check_orders
from simulator.experiments.point import Figures, Point

POINTS = small_points(policies=("slo", "random", "lmetric"), rates=(5.0,))  # on two clusters


def experiment(orders: list[dict[str, Any]], **changes: Any) -> Experiment:
    content: dict[str, Any] = {
        "title": "A title",
        "question": "Which?",
        "source": "A paper",
        "workloads": {"calls": {"generate": "api"}},
        "clusters": {"one": {"cluster": "1"}},
        "policies": ["slo"],
        "orders": orders,
    }
    return Experiment.model_validate(content | changes)


def order(*ascending: str, **changes: Any) -> Experiment:
    return experiment([{"figure": "mean_ttft_s", "label": "policy", "ascending": list(ascending)} | changes])


def figures(*mean_ttft_s: float | None) -> list[Figures]:
    found = [
        {"time_to_first_token": None if value is None else {"avg": value * 1e3}} for value in mean_ttft_s
    ]
    return [{"time_to_first_token": {}} if each["time_to_first_token"] is None else each for each in found]


@given(
    st.permutations(["slo", "random", "lmetric"]),
    st.lists(st.sampled_from([1.0, 2.0, 3.0]), min_size=3, max_size=3),
)
def test_an_order_holds_where_nothing_decreases(expected: list[str], values: list[float]) -> None:
    (first, _) = check_orders(order(*expected), POINTS, figures(*values, 1.0, 1.0, 1.0))
    by_name = dict(zip(("slo", "random", "lmetric"), values, strict=True))
    in_order = [by_name[name] for name in expected]
    assert first.holds == (in_order == sorted(in_order))
    assert [value for _, value in first.ours] == sorted(values)
    assert first.expected == tuple(expected)


def test_points_are_compared_where_they_differ_in_one_label() -> None:
    checked = check_orders(order("slo", "random"), POINTS, figures(1, 2, 0, 5, 4, 0))
    assert [(dict(each.labels)["cluster"], each.holds) for each in checked] == [("1", True), ("1p1d", False)]
    assert checked[1].ours == (("random", 4.0), ("slo", 5.0))
    only = check_orders(order("slo", "random", where={"cluster": "1p1d"}), POINTS, figures(1, 2, 0, 5, 4, 0))
    assert [dict(each.labels)["cluster"] for each in only] == ["1p1d"]


def test_points_that_were_left_out_or_have_no_figure_are_not_compared() -> None:
    shown: list[Point] = [POINTS[0], POINTS[2]]  # slo and lmetric on one cluster
    (checked,) = check_orders(order("random", "lmetric", "slo"), shown, figures(2, 1))
    assert checked.expected == ("lmetric", "slo") and checked.holds
    assert not check_orders(order("random", "lmetric", "slo"), shown, figures(2, None))
    assert not check_orders(order("random", "slo"), shown, figures(2, 1))


def test_clusters_with_their_own_policies_are_compared() -> None:
    points = [POINTS[0], POINTS[4]]  # slo on the first, random on the second
    by_cluster = [{"figure": "mean_ttft_s", "label": "cluster", "ascending": ["1", "1p1d"]}]
    (checked,) = check_orders(experiment(by_cluster, policies=None), points, figures(2, 3))
    assert checked.holds
    assert not check_orders(experiment(by_cluster), points, figures(2, 3))


def test_an_order_of_one_is_none() -> None:
    with pytest.raises(ValueError, match="at least 2 items"):
        order("slo")
