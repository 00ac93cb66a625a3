"""A run as columns: what its figures are calculated from, whether it was simulated or measured over HTTP."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from conductor.placement import Objectives
from simulator.cluster.results import ActionsDone, Outcome, RequestResult, Simulated, TierTraffic, Timeline
from simulator.report.statistics import Column

SLOWER_TIERS: Final = ("host", "disk", "pod", "remote", "peer")  # a peer: the device of another instance


@dataclass(frozen=True, slots=True)
class Measured:
    """Columns have a row for each request that was served, by arrival; NaN where a run does not tell.

    Times of requests are seconds after their arrival. ``queue_s``, ``prefilled_s``, ``received_s`` and the others
    are as in `RequestResult`, but ``tbt_s`` and ``itl_s`` are NaN for answers of one token.
    """

    outcomes: Mapping[str, int]  # of every kind in `Outcome`
    duration_s: float
    arrival_span_s: float  # from the first arrival to the last, served or not
    arrival_s: Column
    prompt_tokens: Column
    output_tokens: Column
    cached_tokens: Column
    ttft_s: Column
    tbt_s: Column
    itl_s: Column
    e2e_s: Column
    predicted_ttft_s: Column
    queue_s: Column
    prefilled_s: Column
    received_s: Column
    prefill_instances: tuple[str, ...]
    decode_instances: tuple[str, ...]
    retries: int
    preemptions: int | None = None
    tier_tokens: Mapping[str, int] | None = None  # reused tokens by where they came from
    tier_actions: Mapping[str, Mapping[str, ActionsDone]] | None = None  # by kind, and how they ended
    tier_traffic: Mapping[str, TierTraffic] | None = None
    load_variation: float | None = None
    busy_s: Mapping[str, float] | None = None
    timeline: Timeline | None = None

    @property
    def requests(self) -> int:
        """All of them, served or not."""
        return sum(self.outcomes.values())

    @property
    def served(self) -> int:
        return len(self.arrival_s)

    def judged_tbt_s(self, objectives: Objectives) -> Column:
        """What the TBT objective is for: the mean of the longest tenth of gaps, or of all."""
        return self.itl_s if objectives.tbt_share == 1.0 else self.tbt_s


def measured(simulated: Simulated) -> Measured:
    """A simulated run as columns. What decodes where it was prefilled is received when that ends."""
    results = sorted(simulated.results, key=lambda result: (result.arrival_s, result.number))
    served = [result for result in results if result.outcome is Outcome.FINISHED]
    counted = Counter(result.outcome for result in results)
    several = _column(served, "output_tokens") > 1
    slower = {tier: sum(getattr(r, f"{tier}_tokens") for r in served) for tier in SLOWER_TIERS}
    reused = sum(result.cached_tokens for result in served)
    prefilled_s, received_s = _column(served, "prefilled_s"), _column(served, "received_s")
    return Measured(
        outcomes={kind.value: counted[kind] for kind in Outcome},
        duration_s=simulated.end_s,
        arrival_span_s=results[-1].arrival_s - results[0].arrival_s if results else 0.0,
        arrival_s=_column(served, "arrival_s"),
        prompt_tokens=_column(served, "prompt_tokens"),
        output_tokens=_column(served, "output_tokens"),
        cached_tokens=_column(served, "cached_tokens"),
        ttft_s=_column(served, "ttft_s"),
        tbt_s=np.where(several, _column(served, "tbt_s"), np.nan),
        itl_s=np.where(several, _column(served, "itl_s"), np.nan),
        e2e_s=_column(served, "e2e_s"),
        predicted_ttft_s=_column(served, "predicted_ttft_s"),
        queue_s=_column(served, "queue_s"),
        prefilled_s=prefilled_s,
        received_s=np.where(np.isnan(received_s), prefilled_s, received_s),
        prefill_instances=tuple(result.prefill_instance for result in served),
        decode_instances=tuple(result.decode_instance for result in served),
        retries=sum(result.retries for result in results),
        preemptions=sum(result.preemptions for result in results),
        tier_tokens={"device": reused - sum(slower.values()), **slower},
        tier_actions=simulated.tier_actions,
        tier_traffic=simulated.tier_traffic,
        load_variation=simulated.load_variation,
        busy_s=simulated.busy_s,
        timeline=simulated.timeline,
    )


def _column(results: list[RequestResult], name: str) -> Column:
    values = np.array([getattr(result, name) for result in results], np.float64)
    return np.where(np.isinf(values), np.nan, values)
