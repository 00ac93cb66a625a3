"""Figures of a simulated trace, under AIPerf's names where it has them (tags of AIPerf 0.13)."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from conductor.placement import Objectives
from simulator.cluster.simulation import Outcome, RequestResult, Simulated

SCHEMA_VERSION: Final = 1
_PERCENTILES: Final = (50, 90, 99)


def summary(simulated: Simulated, objectives: Objectives) -> dict[str, Any]:
    """Statistics in milliseconds, rates per second of simulated time; JSON types only.

    Beside AIPerf's: ``longest_tenth_token_latency`` (mean of a request's longest tenth of gaps),
    ``ttft_fraction`` and ``tbt_fraction`` (requests that meet that objective), ``prefix_cache_reused_ratio``
    (of prompt tokens), ``load_variation`` (see `Simulated`), ``queue_time``, ``ttft_prediction_error``.
    Requests that were not served count as missing their objectives.
    """
    served = [result for result in simulated.results if result.outcome is Outcome.FINISHED]
    requests = len(simulated.results)
    ttft_s, tbt_s = _column(served, "ttft_s"), _column(served, "tbt_s")
    meets_ttft, meets_tbt = ttft_s <= objectives.ttft_s, tbt_s <= objectives.tbt_s
    good = int((meets_ttft & meets_tbt).sum())
    prompt_tokens = sum(result.prompt_tokens for result in served)
    output_tokens = sum(result.output_tokens for result in served)
    cached_tokens = sum(result.cached_tokens for result in served)
    duration_s = simulated.end_s
    several = [result for result in served if result.output_tokens > 1]
    return {
        "schema_version": SCHEMA_VERSION,
        "request_count": len(served),
        "error_request_count": requests - len(served),
        "rejected_request_count": sum(r.outcome is Outcome.REJECTED for r in simulated.results),
        "benchmark_duration": _rounded(duration_s),
        "request_throughput": _rounded(len(served) / duration_s if duration_s else 0.0),
        "output_token_throughput": _rounded(output_tokens / duration_s if duration_s else 0.0),
        "goodput": _rounded(good / duration_s if duration_s else 0.0),
        "good_request_count": good,
        "good_request_fraction": _fraction(good, requests),
        "ttft_fraction": _fraction(int(meets_ttft.sum()), requests),
        "tbt_fraction": _fraction(int(meets_tbt.sum()), requests),
        "time_to_first_token": _statistics(ttft_s),
        "longest_tenth_token_latency": _statistics(_column(several, "tbt_s")),
        "inter_token_latency": _statistics(_column(several, "itl_s")),
        "request_latency": _statistics(_column(served, "e2e_s")),
        "queue_time": _statistics(_column(served, "queue_s")),
        "ttft_prediction_error": _statistics(np.abs(_column(served, "predicted_ttft_s") - ttft_s)),
        "usage_prompt_cache_read_tokens": cached_tokens,
        "prefix_cache_reused_ratio": _fraction(cached_tokens, prompt_tokens),
        "load_variation": _rounded(simulated.load_variation),
        "busy_fraction": {
            name: _rounded(busy_s / duration_s if duration_s else 0.0)
            for name, busy_s in simulated.busy_s.items()
        },
    }


def request_rows(simulated: Simulated) -> list[dict[str, Any]]:
    """One JSON object for each request, by number; times in seconds, null where there is none."""
    return [
        {
            name: None if isinstance(value := getattr(result, name), float) and value == np.inf else value
            for name in RequestResult.__slots__
        }
        for result in sorted(simulated.results, key=lambda result: result.number)
    ]


def _column(results: list[RequestResult], name: str) -> NDArray[np.float64]:
    return np.array([getattr(result, name) for result in results], np.float64)


def _statistics(seconds: NDArray[np.float64]) -> dict[str, Any] | None:
    if not len(seconds):
        return None
    ms = seconds * 1e3
    percentiles = np.percentile(ms, _PERCENTILES).tolist()
    return {
        "unit": "ms",
        "avg": _rounded(float(ms.mean())),
        "min": _rounded(float(ms.min())),
        "max": _rounded(float(ms.max())),
        "std": _rounded(float(ms.std())),
        **{f"p{which}": _rounded(value) for which, value in zip(_PERCENTILES, percentiles, strict=True)},
    }


def _fraction(part: int, whole: int) -> float:
    return _rounded(part / whole) if whole else 0.0


def _rounded(value: float) -> float:
    return round(value, 6)
