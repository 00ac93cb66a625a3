"""The JSON summary: figures against plain sums, one set of keys, equal bytes of equal runs."""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from simulated_runs import busy_pairs, finished, lost, simulated

from conductor.cli.live_replay import RequestResult, report
from conductor.placement import Objectives
from simulator.cluster import Outcome
from simulator.report import measured, summary

OBJECTIVES = Objectives(ttft_s=1.0, tbt_s=0.05)
GOLDEN = Path(__file__).with_name("summary_keys.txt")


@dataclass(frozen=True, slots=True)
class KnownBounds:
    mean_ttft_s: float = 0.5
    good_requests: float = 4.0
    reuse_ratio_capacity: float = 0.5
    reuse_ratio_unlimited: float = 0.8


def keys(value: Any, path: str = "") -> list[str]:
    if isinstance(value, dict):
        return [line for key, each in value.items() for line in keys(each, f"{path}.{key}".lstrip("."))]
    return [f"{path}: {type(value).__name__}"]


def test_the_keys_are_stable() -> None:
    """Whoever changes them changes SCHEMA_VERSION, this file's golden neighbour and docs/reports.md."""
    found = keys(summary(busy_pairs(50), OBJECTIVES, KnownBounds(good_requests=40.0)))
    assert "\n".join(found) + "\n" == GOLDEN.read_text()


def test_every_key_is_documented() -> None:
    docs = (Path(__file__).parents[3] / "docs" / "reports.md").read_text()
    for key in summary(busy_pairs(50), OBJECTIVES):
        assert f"`{key}`" in docs, key


def test_equal_runs_are_equal_to_the_byte() -> None:
    assert len({json.dumps(summary(busy_pairs(200), OBJECTIVES)) for _ in range(2)}) == 1


def test_figures_are_those_of_the_requests() -> None:
    results = [
        finished(0, 0.0),
        finished(1, 1.0, ttft_s=1.5, e2e_s=2.0, predicted_ttft_s=1.0, cached_tokens=0, host_tokens=0),
        finished(2, 2.0, tbt_s=0.06, output_tokens=21, itl_s=0.04, preemptions=2),
        finished(3, 3.0, output_tokens=1, tbt_s=0.0, itl_s=0.0, e2e_s=0.65, retries=1),
        lost(4, 4.0),
        lost(5, 5.0, Outcome.FAILED),
    ]
    run = replace(simulated(results), end_s=10.0)
    figures = summary(run, OBJECTIVES)
    assert (figures["request_count"], figures["error_request_count"]) == (4, 2)
    assert figures["outcomes"] == {"finished": 4, "rejected": 1, "refused": 0, "failed": 1}
    assert figures["request_rate"] == pytest.approx(6 / 5)
    assert figures["request_throughput"] == pytest.approx(0.4)
    assert figures["output_token_throughput"] == pytest.approx((11 + 11 + 21 + 1) / 10)
    assert (figures["good_request_count"], figures["goodput"]) == (2, pytest.approx(0.2))
    assert figures["good_request_fraction"] == pytest.approx(2 / 6, abs=1e-6)
    assert figures["ttft_fraction"] == pytest.approx(3 / 6)
    assert figures["tbt_fraction"] == pytest.approx(3 / 6)
    of_all_gaps = summary(run, replace(OBJECTIVES, tbt_share=1.0))
    assert (of_all_gaps["good_request_count"], of_all_gaps["tbt_fraction"]) == (3, pytest.approx(4 / 6))
    ttfts_ms = [650.0, 1_500.0, 650.0, 650.0]
    ttft = figures["time_to_first_token"]
    assert (ttft["unit"], ttft["min"], ttft["max"], ttft["p50"]) == ("ms", 650.0, 1_500.0, 650.0)
    assert ttft["avg"] == pytest.approx(statistics.fmean(ttfts_ms))
    assert ttft["std"] == pytest.approx(statistics.stdev(ttfts_ms), rel=1e-6)
    assert figures["time_to_first_token_parts"] == pytest.approx(
        {"queue": 100.0, "prefill": 400.0, "hand_off": 100.0, "first_step": (3 * 50.0 + 900.0) / 4}
    )
    assert figures["longest_tenth_token_latency"]["max"] == 60.0
    assert figures["inter_token_latency"]["min"] == 20.0, "an answer of one token has no gaps"
    assert figures["ttft_prediction_error"]["max"] == 500.0
    assert figures["prefix_cache_reused_ratio"] == pytest.approx(0.3)
    assert figures["usage_prompt_cache_read_tokens"]["avg"] == pytest.approx(300.0)
    assert figures["total_usage_prompt_cache_read_tokens"] == 1_200
    assert figures["reuse_by_tier"]["device"] == {"tokens": 900, "ratio": 0.225}
    assert figures["reuse_by_tier"]["host"] == {"tokens": 300, "ratio": 0.075}
    assert (figures["preemptions"], figures["retries"]) == (2, 1)
    assert figures["busy_fraction"].keys() == {"p0", "p1", "d0", "d1"}
    assert (figures["bounds"], figures["gaps"]) == (None, None)


def test_gaps_to_bounds() -> None:
    run = simulated([finished(0, 0.0), finished(1, 1.0, ttft_s=1.35)])
    gaps = summary(run, OBJECTIVES, KnownBounds())["gaps"]
    assert gaps == {
        "mean_time_to_first_token_ratio": 2.0,
        "good_request_fraction_of_bound": 0.25,
        "reuse_fraction_of_capacity_bound": 0.8,
        "reuse_fraction_of_unlimited_bound": 0.5,
    }
    one_lost = simulated([finished(0, 0.0), lost(1, 1.0)])
    gaps = summary(one_lost, OBJECTIVES, KnownBounds())["gaps"]
    assert gaps["mean_time_to_first_token_ratio"] is None, "the mean of fewer requests than the bound's"
    nothing = KnownBounds(good_requests=0.0, reuse_ratio_capacity=0.0)
    gaps = summary(run, OBJECTIVES, nothing)["gaps"]
    assert gaps["good_request_fraction_of_bound"] is gaps["reuse_fraction_of_capacity_bound"] is None


def test_a_run_that_served_nothing_has_the_same_keys() -> None:
    served, nothing = (summary(simulated([one]), OBJECTIVES) for one in (finished(0, 0.0), lost(0, 0.0)))
    assert list(nothing) == list(served)
    assert nothing["time_to_first_token"] is None
    assert nothing["good_request_fraction"] == nothing["prefix_cache_reused_ratio"] == 0.0


def test_a_replay_over_http_has_the_same_keys() -> None:
    seen = [
        RequestResult(sent_s=0.0, ttft_s=0.5, duration_s=1.0, gaps_s=[0.05] * 10, prompt_tokens=100),
        RequestResult(
            sent_s=1.0, ttft_s=0.7, duration_s=0.7, prompt_tokens=100, cached_tokens=50, predicted_ttft_s=0.6
        ),
        RequestResult(sent_s=2.0, error="HTTP 429: too many requests"),
        RequestResult(sent_s=3.0, error="ClientError: gone", attempts=3),
    ]
    figures = report(seen, 4.0, OBJECTIVES)
    simulated_figures = summary(busy_pairs(20), OBJECTIVES)
    assert list(figures)[: len(simulated_figures)] == list(simulated_figures)
    assert figures["outcomes"] == {"finished": 2, "rejected": 1, "refused": 0, "failed": 1}
    assert (figures["good_request_count"], figures["retries"]) == (2, 2)
    assert figures["time_to_first_token"]["avg"] == pytest.approx(600.0)
    assert figures["ttft_prediction_error"]["avg"] == pytest.approx(100.0)
    assert figures["longest_tenth_token_latency"]["avg"] == pytest.approx(50.0)
    assert figures["prefix_cache_reused_ratio"] == 0.25
    assert figures["request_rate"] == pytest.approx(4 / 3)
    assert figures["queue_time"] is figures["reuse_by_tier"] is figures["load_variation"] is None
    assert json.loads(json.dumps(figures)) == figures


def test_columns_are_by_arrival_and_unknown_is_nan() -> None:
    run = measured(
        simulated([finished(1, 2.0, ttft_s=0.9, prefilled_s=float("inf")), lost(2, 3.0), finished(0, 1.0)])
    )
    assert run.arrival_s.tolist() == [1.0, 2.0]
    assert run.ttft_s.tolist() == [0.65, 0.9]
    assert np.isnan(run.prefilled_s).tolist() == [False, True]
    stays = measured(simulated([finished(0, 0.0, decode_instance="p0", received_s=float("inf"))]))
    assert stays.received_s.tolist() == stays.prefilled_s.tolist() == [0.5]
    assert (run.requests, run.served, run.arrival_span_s) == (3, 2, 2.0)
