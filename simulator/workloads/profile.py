"""A trace in figures: lengths, arrivals, sessions, and what caches of several sizes would reuse."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from simulator.workloads.records import TraceRecord
from simulator.workloads.reuse import (
    UnlimitedReuse,
    belady_hits,
    block_accesses,
    lru_hits,
    next_uses,
    unlimited_reuse,
)
from simulator.workloads.selection import trace_span_s

PERCENTILES: Final = (10, 50, 90, 99)
CAPACITIES_BLOCKS: Final = (1_000, 3_000, 10_000, 30_000, 100_000, 300_000)


@dataclass(frozen=True, slots=True)
class Lengths:
    """Of prompts or answers, in tokens."""

    mean: float
    percentiles: dict[int, float]
    longest: int
    total: int


@dataclass(frozen=True, slots=True)
class Arrivals:
    span_s: float
    requests_per_s: float  # over the span; 0 for a trace without arrival times
    gap_cv: float  # standard deviation over mean of the gaps between arrivals: 1 for Poisson, more for bursts
    busiest_minute: int  # requests in the busiest whole minute from the first arrival
    sessions: int  # 0 when the trace names none
    turns_per_session: float
    median_delay_s: float | None


@dataclass(frozen=True, slots=True)
class CapacityReuse:
    """Block hit rates of one cache for the whole trace."""

    capacity_blocks: int
    capacity_tokens: int
    lru_hit_rate: float
    belady_hit_rate: float


@dataclass(frozen=True, slots=True)
class TraceProfile:
    requests: int
    block_tokens: int
    inputs: Lengths
    outputs: Lengths
    arrivals: Arrivals
    unlimited: UnlimitedReuse
    by_capacity: list[CapacityReuse]


def capacity_reuse(records: Sequence[TraceRecord], capacities_blocks: Sequence[int]) -> list[CapacityReuse]:
    """One for each capacity; ``records``, of which there is one at least, are in order of arrival."""
    accesses = block_accesses(records)
    following = next_uses(accesses)
    block_tokens = records[0].block_tokens
    return [_capacity_reuse(accesses, following, block_tokens, capacity) for capacity in capacities_blocks]


def profile_trace(
    records: Sequence[TraceRecord],
    capacities_blocks: Sequence[int] = CAPACITIES_BLOCKS,
    on_step: Callable[[], None] = lambda: None,
) -> TraceProfile:
    """All figures of ``records``, which are taken in order of arrival; ``on_step`` is called per capacity.

    Capacities that hold more than every block once are left out but for the smallest of them. Raises ValueError
    without records.
    """
    if not records:
        raise ValueError("a trace without requests has no figures")
    ordered = sorted(records, key=lambda record: record.arrival_s)
    block_tokens = ordered[0].block_tokens
    unlimited = unlimited_reuse(ordered)
    accesses = block_accesses(ordered)
    following = next_uses(accesses)
    rows: list[CapacityReuse] = []
    for capacity in sorted(set(capacities_blocks)):
        if not rows or rows[-1].capacity_blocks < unlimited.unique_blocks:
            rows.append(_capacity_reuse(accesses, following, block_tokens, capacity))
        on_step()
    return TraceProfile(
        requests=len(ordered),
        block_tokens=block_tokens,
        inputs=_lengths([record.input_tokens for record in ordered]),
        outputs=_lengths([record.output_tokens for record in ordered]),
        arrivals=_arrivals(ordered),
        unlimited=unlimited,
        by_capacity=rows,
    )


def _capacity_reuse(
    accesses: Sequence[int], following: Sequence[int], block_tokens: int, capacity_blocks: int
) -> CapacityReuse:
    return CapacityReuse(
        capacity_blocks,
        capacity_blocks * block_tokens,
        lru_hits(accesses, capacity_blocks) / max(1, len(accesses)),
        belady_hits(accesses, capacity_blocks, following) / max(1, len(accesses)),
    )


def _lengths(tokens: list[int]) -> Lengths:
    values = np.asarray(tokens)
    percentiles = dict(zip(PERCENTILES, map(float, np.percentile(values, PERCENTILES)), strict=True))
    return Lengths(float(values.mean()), percentiles, int(values.max()), int(values.sum()))


def _arrivals(ordered: Sequence[TraceRecord]) -> Arrivals:
    arrivals_s = np.array([record.arrival_s for record in ordered])
    span_s = trace_span_s(ordered)
    gaps_s = np.diff(arrivals_s)
    mean_gap_s = float(gaps_s.mean()) if len(gaps_s) else 0.0
    minutes = ((arrivals_s - arrivals_s[0]) // 60).astype(np.int64)
    named = [record.session_id for record in ordered if record.session_id is not None]
    sessions = len(set(named))
    delays_s = [record.delay_s for record in ordered if record.delay_s is not None]
    return Arrivals(
        span_s=span_s,
        requests_per_s=len(ordered) / span_s if span_s else 0.0,
        gap_cv=float(gaps_s.std()) / mean_gap_s if mean_gap_s else 0.0,
        busiest_minute=int(np.unique(minutes, return_counts=True)[1].max()),
        sessions=sessions,
        turns_per_session=len(named) / sessions if sessions else 0.0,
        median_delay_s=float(np.median(delays_s)) if delays_s else None,
    )
