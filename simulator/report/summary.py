"""Figures of a run, under AIPerf's names where it has them (tags of AIPerf 0.13)."""

from __future__ import annotations

from dataclasses import asdict
from math import isinf
from typing import Any, Final

import numpy as np

from conductor.placement import Objectives
from simulator.cluster.results import RequestResult, Simulated
from simulator.report.bounds import Bounds, bounds_and_gaps
from simulator.report.measured import Measured, measured
from simulator.report.statistics import Column, in_ms, mean_ms, ratio, rounded, statistics

SCHEMA_VERSION: Final = 2


def summary(
    run: Simulated | Measured, objectives: Objectives, bounds: Bounds | None = None
) -> dict[str, Any]:
    """Statistics in milliseconds and tokens, rates per second of the run's time; JSON types only.

    The keys are always the same (`RunFile` describes them), null where the run does not tell. Requests that
    were not served count as missing their objectives. Equal runs give equal summaries, to the last byte.
    """
    of = measured(run) if isinstance(run, Simulated) else run
    meets_ttft = of.ttft_s <= objectives.ttft_s
    # An answer of one token has no gap that could be too long.
    meets_tbt = ~(of.judged_tbt_s(objectives) > objectives.tbt_s)
    good = int((meets_ttft & meets_tbt).sum())
    prompt_tokens, cached_tokens = float(of.prompt_tokens.sum()), float(of.cached_tokens.sum())
    mean_ttft_ms = mean_ms(of.ttft_s)
    return {
        "schema_version": SCHEMA_VERSION,
        "request_count": of.served,
        "error_request_count": of.requests - of.served,
        "outcomes": dict(of.outcomes),
        "benchmark_duration": rounded(of.duration_s),
        "request_rate": ratio(of.requests, of.arrival_span_s),
        "request_throughput": ratio(of.served, of.duration_s),
        "output_token_throughput": ratio(float(of.output_tokens.sum()), of.duration_s),
        "goodput": ratio(good, of.duration_s),
        "good_request_count": good,
        "good_request_fraction": ratio(good, of.requests),
        "ttft_fraction": ratio(int(meets_ttft.sum()), of.requests),
        "tbt_fraction": ratio(int(meets_tbt.sum()), of.requests),
        "time_to_first_token": in_ms(of.ttft_s),
        "time_to_first_token_parts": _parts(of),
        "longest_tenth_token_latency": in_ms(of.tbt_s),
        "inter_token_latency": in_ms(of.itl_s),
        "request_latency": in_ms(of.e2e_s),
        "queue_time": in_ms(of.queue_s),
        "ttft_prediction_error": in_ms(np.abs(of.predicted_ttft_s - of.ttft_s)),
        "output_token_throughput_per_user": statistics(_per_second(of.itl_s), "tokens/sec/user"),
        "input_sequence_length": statistics(of.prompt_tokens, "tokens"),
        "output_sequence_length": statistics(of.output_tokens, "tokens"),
        "usage_prompt_cache_read_tokens": statistics(of.cached_tokens, "tokens"),
        "total_usage_prompt_cache_read_tokens": round(cached_tokens),
        "prefix_cache_reused_ratio": ratio(cached_tokens, prompt_tokens),
        "reuse_by_tier": _reuse_by_tier(of, prompt_tokens),
        "tier_actions": of.tier_actions
        and {
            kind: {outcome: asdict(done) for outcome, done in by_outcome.items()}
            for kind, by_outcome in of.tier_actions.items()
        },
        "tier_traffic": of.tier_traffic and {tier: asdict(each) for tier, each in of.tier_traffic.items()},
        "preemptions": of.preemptions,
        "retries": of.retries,
        "load_variation": None if of.load_variation is None else rounded(of.load_variation),
        "busy_fraction": (
            None
            if of.busy_s is None
            else {name: ratio(busy_s, of.duration_s) for name, busy_s in of.busy_s.items()}
        ),
        **bounds_and_gaps(
            bounds,
            mean_ttft_s=None if mean_ttft_ms is None else mean_ttft_ms / 1e3,
            good_requests=good,
            reuse_ratio=cached_tokens / prompt_tokens if prompt_tokens else 0.0,
            all_served=of.served == of.requests,
        ),
    }


def request_rows(simulated: Simulated) -> list[dict[str, Any]]:
    """One JSON object for each request, by number; times in seconds, null where there is none."""
    return [
        {
            name: None if isinstance(value := getattr(result, name), float) and isinf(value) else value
            for name in RequestResult.__struct_fields__
        }
        for result in sorted(simulated.results, key=lambda result: result.number)
    ]


def _parts(of: Measured) -> dict[str, float | None]:
    """Means: what the first token waits for, one after the other."""
    return {
        "queue": mean_ms(of.queue_s),
        "prefill": mean_ms(of.prefilled_s - of.queue_s),
        "hand_off": mean_ms(of.received_s - of.prefilled_s),
        "first_step": mean_ms(of.ttft_s - of.received_s),
    }


def _reuse_by_tier(of: Measured, prompt_tokens: float) -> dict[str, Any] | None:
    if of.tier_tokens is None:
        return None
    return {
        tier: {"tokens": tokens, "ratio": ratio(tokens, prompt_tokens)}
        for tier, tokens in of.tier_tokens.items()
    }


def _per_second(gaps_s: Column) -> Column:
    return np.divide(1.0, gaps_s, out=np.full_like(gaps_s, np.nan), where=gaps_s > 0.0)
