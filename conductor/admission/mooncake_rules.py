"""The rules of Mooncake (arXiv 2407.00079v3, section 7), at the level of detail of the paper.

Load is predicted TTFT over its objective for prefill, and predicted TBT over its objective for decode.
"""

from __future__ import annotations

from dataclasses import dataclass

from conductor.admission.forecast import DecodeForecast
from conductor.admission.prospect import (
    Prospect,
    Rejection,
    decode_positions,
    finite,
    refuse_decode,
    refuse_prefill,
)
from conductor.placement import PlacementRequest
from conductor.policies import Candidates, Choice


@dataclass(frozen=True, slots=True)
class AcceptAll:
    """Serves everything, however late."""

    name = "accept_all"

    def judge(
        self,
        request: PlacementRequest,
        candidates: Candidates,
        choice: Choice,
        prospect: Prospect,
        forecast: DecodeForecast,
    ) -> Rejection | None:
        return None

    def judge_decode(
        self, request: PlacementRequest, prospect: Prospect, forecast: DecodeForecast
    ) -> Rejection | None:
        return None


@dataclass(frozen=True, slots=True)
class Baseline:
    """Each stage is checked when it starts, so a prefill may turn out to have been for nothing."""

    limit: float = 1.0
    name = "baseline"

    def __post_init__(self) -> None:
        finite("limit", self.limit, 0.0)

    def judge(
        self,
        request: PlacementRequest,
        candidates: Candidates,
        choice: Choice,
        prospect: Prospect,
        forecast: DecodeForecast,
    ) -> Rejection | None:
        return _judge_prefill(request, candidates, choice, prospect, self.limit)

    def judge_decode(
        self, request: PlacementRequest, prospect: Prospect, forecast: DecodeForecast
    ) -> Rejection | None:
        load = prospect.tbt_load
        if load <= self.limit:
            return None
        now_s, rows = prospect.now_s, prospect.table_rows

        def load_in(wait_s: float) -> float:
            carried = forecast.at(now_s + wait_s, now_s, rows=rows)
            return float(prospect.tbt_loads(carried, 0.0, 0.0).min())

        return refuse_decode(request, prospect, load=load, limit=self.limit, load_in=load_in)


@dataclass(frozen=True, slots=True)
class Early:
    """Early rejection: both pools are checked at arrival, as they are then.

    What is being prefilled loads decode only later, so prefill and decode load swing in anti-phase (figure 9).
    """

    limit: float = 1.0
    name = "early"

    def __post_init__(self) -> None:
        finite("limit", self.limit, 0.0)

    def judge(
        self,
        request: PlacementRequest,
        candidates: Candidates,
        choice: Choice,
        prospect: Prospect,
        forecast: DecodeForecast,
    ) -> Rejection | None:
        now_s, rows = prospect.now_s, prospect.table_rows
        place = int(decode_positions(candidates).searchsorted(choice.decode))

        def load_in(wait_s: float) -> float:
            carried = forecast.at(now_s + wait_s, now_s, rows=rows)
            return float(prospect.tbt_loads(carried, 1.0, request.prompt_tokens)[place])

        load = load_in(0.0)
        if load > self.limit and load >= prospect.ttft_load:
            return refuse_decode(request, prospect, load=load, limit=self.limit, load_in=load_in)
        return _judge_prefill(request, candidates, choice, prospect, self.limit)

    def judge_decode(
        self, request: PlacementRequest, prospect: Prospect, forecast: DecodeForecast
    ) -> Rejection | None:
        return None


@dataclass(frozen=True, slots=True)
class EarlyPredicted:
    """Early rejection based on prediction, at system level.

    Decode load is that of the moment when this prefill will end: every decode is taken to last ``decode_s`` and
    to go to any decode rank alike; the load of the pool is the mean over its ranks.
    """

    limit: float = 1.0
    decode_s: float = 10.0  # t_d of the paper, which gives no figure: mean answer length times mean TBT
    name = "early_predicted"

    def __post_init__(self) -> None:
        finite("limit", self.limit, 0.0)
        finite("decode_s", self.decode_s, 1e-3)

    def judge(
        self,
        request: PlacementRequest,
        candidates: Candidates,
        choice: Choice,
        prospect: Prospect,
        forecast: DecodeForecast,
    ) -> Rejection | None:
        now_s, rows = prospect.now_s, prospect.table_rows
        share = 1.0 / len(prospect.decode_rows)

        def load_in(wait_s: float) -> float:
            carried = forecast.at_uniform(prospect.prefill_end_s + wait_s, self.decode_s, now_s, rows=rows)
            # Steps are affine, so the mean over equal ranks does not depend on who carries what.
            return float(prospect.tbt_loads(carried, share, share * request.prompt_tokens).mean())

        load = load_in(0.0)
        if load > self.limit and load >= prospect.ttft_load:
            return refuse_decode(request, prospect, load=load, limit=self.limit, load_in=load_in)
        return _judge_prefill(request, candidates, choice, prospect, self.limit)

    def judge_decode(
        self, request: PlacementRequest, prospect: Prospect, forecast: DecodeForecast
    ) -> Rejection | None:
        return None


def _judge_prefill(
    request: PlacementRequest, candidates: Candidates, choice: Choice, prospect: Prospect, limit: float
) -> Rejection | None:
    load = prospect.ttft_load
    if load <= limit:
        return None
    queue_s = float(candidates.queue_s[choice.prefill])
    return refuse_prefill(request, prospect, ttft_s=prospect.ttft_s, queue_s=queue_s, load=load, limit=limit)
