"""The schema of run files: ``RunFile.model_json_schema()`` is its JSON Schema."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class StatisticsPart(_Part):
    unit: str
    avg: float
    min: float
    max: float
    p1: float
    p5: float
    p10: float
    p25: float
    p50: float
    p75: float
    p90: float
    p95: float
    p99: float
    std: float


class OutcomesPart(_Part):
    finished: int
    rejected: int
    refused: int
    failed: int


class TtftPartsPart(_Part):
    """Means in milliseconds."""

    queue: float | None
    prefill: float | None
    hand_off: float | None
    first_step: float | None


class ReusePart(_Part):
    tokens: int
    ratio: float


class ReuseByTierPart(_Part):
    device: ReusePart
    host: ReusePart
    disk: ReusePart
    pod: ReusePart
    remote: ReusePart
    peer: ReusePart


class TierActionsPart(_Part):
    actions: int
    blocks: int
    moved_bytes: int


class TierTrafficPart(_Part):
    carried_bytes: float
    written_bytes: float


class BoundsPart(_Part):
    mean_time_to_first_token: float
    good_request_count: float
    prefix_cache_reused_ratio_capacity: float
    prefix_cache_reused_ratio_unlimited: float


class GapsPart(_Part):
    mean_time_to_first_token_ratio: float | None
    good_request_fraction_of_bound: float | None
    reuse_fraction_of_capacity_bound: float | None
    reuse_fraction_of_unlimited_bound: float | None


class SummaryPart(_Part):
    schema_version: Literal[2]
    request_count: int
    error_request_count: int
    outcomes: OutcomesPart
    benchmark_duration: float
    request_rate: float
    request_throughput: float
    output_token_throughput: float
    goodput: float
    good_request_count: int
    good_request_fraction: float
    ttft_fraction: float
    tbt_fraction: float
    time_to_first_token: StatisticsPart | None
    time_to_first_token_parts: TtftPartsPart
    longest_tenth_token_latency: StatisticsPart | None
    inter_token_latency: StatisticsPart | None
    request_latency: StatisticsPart | None
    queue_time: StatisticsPart | None
    ttft_prediction_error: StatisticsPart | None
    output_token_throughput_per_user: StatisticsPart | None
    input_sequence_length: StatisticsPart | None
    output_sequence_length: StatisticsPart | None
    usage_prompt_cache_read_tokens: StatisticsPart | None
    total_usage_prompt_cache_read_tokens: int
    prefix_cache_reused_ratio: float
    reuse_by_tier: ReuseByTierPart | None
    tier_actions: dict[str, dict[str, TierActionsPart]] | None = None  # by kind, and how they ended
    tier_traffic: dict[str, TierTrafficPart] | None = None  # by tier
    preemptions: int | None
    retries: int
    load_variation: float | None
    busy_fraction: dict[str, float] | None
    bounds: BoundsPart | None
    gaps: GapsPart | None


class ObjectivesPart(_Part):
    ttft_s: float
    tbt_s: float
    tbt_share: float


class CumulativePart(_Part):
    """``percent`` of all requests that took at most so many ``ms``."""

    ms: list[float]
    percent: list[float]


class RollingPart(_Part):
    """Percentiles in milliseconds, of the requests that arrived within ``window_s`` around ``at_s``."""

    window_s: float
    at_s: list[float]
    p50: list[float | None]
    p95: list[float | None]
    p99: list[float | None]


class LoadVariationPart(_Part):
    at_s: list[float]
    cv: list[float]


class HeatmapsPart(_Part):
    """Gauges as rows of instances and columns of periods; ``kv_usage`` in per cent."""

    start_s: float
    step_s: float
    instances: list[str]
    running: list[list[float]]
    waiting: list[list[float]]
    kv_usage: list[list[float]]


class CurvesPart(_Part):
    ttft: CumulativePart
    tbt: CumulativePart
    ttft_over_time: RollingPart
    load_variation: LoadVariationPart | None
    heatmaps: HeatmapsPart | None


class RunFile(_Part):
    format: Literal["conductor-run"]
    name: str
    configuration: dict[str, Any]
    objectives: ObjectivesPart
    summary: SummaryPart
    curves: CurvesPart
