"""Which run is best in a figure, and by how much the others differ."""

from __future__ import annotations

import copy
from typing import Any

from simulated_runs import busy_pairs

from conductor.placement import Objectives
from simulator.report import compare, summary
from simulator.report.comparison import FIGURES, Row
from simulator.report.rate_sweep import RateSeries, rate_series

SUMMARY = summary(busy_pairs(50), Objectives())


def changed(**values: Any) -> dict[str, Any]:
    return copy.deepcopy(SUMMARY) | values


def rows(*summaries: dict[str, Any]) -> dict[tuple[str, str], Row]:
    return {(row.figure.group, row.figure.label): row for row in compare(summaries)}


def test_the_best_is_marked_and_the_others_differ() -> None:
    found = rows(
        changed(goodput=2.0, good_request_fraction=0.5, retries=0),
        changed(goodput=1.0, good_request_fraction=0.4504, retries=3),
        changed(goodput=1.995, good_request_fraction=0.4995, retries=0),
    )
    goodput = found["Service", "goodput"].cells
    assert [(cell.best, cell.difference) for cell in goodput] == [(True, ""), (False, "-50 %"), (True, "")]
    good = found["Service", "good requests"].cells
    assert [(cell.text, cell.difference) for cell in good] == [
        ("50.0", ""),
        ("45.0", "-5.0 pts"),
        ("50.0", ""),
    ]
    assert [cell.best for cell in found["Cluster", "retries"].cells] == [True, False, True]


def test_less_is_better_for_times() -> None:
    slow = copy.deepcopy(SUMMARY)
    slow["time_to_first_token"]["p99"] *= 5
    cells = rows(SUMMARY, slow)["Time to first token", "p99"].cells
    assert [(cell.best, cell.difference) for cell in cells] == [(True, ""), (False, "5.0x")]


def test_equal_runs_have_no_best() -> None:
    assert not any(cell.best for row in compare([SUMMARY, SUMMARY]) for cell in row.cells)


def test_what_a_run_does_not_tell_is_a_dash() -> None:
    cells = rows(SUMMARY, changed(queue_time=None))["Queue before prefill", "mean"].cells
    assert cells[1].text == "-"
    nobody = changed(queue_time=None)
    assert ("Queue before prefill", "mean") not in rows(nobody, nobody)
    assert not any(row.figure.group == "Against the bounds" for row in compare([SUMMARY]))


def test_short_names_are_told_apart() -> None:
    short = [figure.short for figure in FIGURES if figure.short]
    assert len(set(short)) == len(short) > 10


def document(policy: str, speed: float, rate: float, goodput: float) -> dict[str, Any]:
    return {
        "configuration": {"policy": policy, "speed": speed, "cluster": "8"},
        "summary": {"request_rate": rate, "goodput": goodput},
    }


def test_a_sweep_over_rates_is_a_series_for_each_policy() -> None:
    documents = [
        document("slo", 2.0, 20.0, 15.0),
        document("slo", 1.0, 10.0, 10.0),
        document("random", 1.0, 10.0, 5.0),
    ]
    assert rate_series(documents, ["a", "b", "c"]) == [
        RateSeries("slo", [(10.0, 10.0), (20.0, 15.0)]),
        RateSeries("random", [(10.0, 5.0)]),
    ]
    assert rate_series(documents[1:], ["b", "c"]) == [], "one rate only"
    alone = rate_series(documents[:2], ["a", "b"])
    assert alone == [RateSeries("a", [(10.0, 10.0), (20.0, 15.0)])]
