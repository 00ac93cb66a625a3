"""What admission judges: the prospect of placing a request, and the answer to one that is turned away."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Final, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from conductor.admission.forecast import DecodeForecast, DecodeLoad
from conductor.costs import Floats
from conductor.placement import PlacementRequest
from conductor.policies import Candidates, Choice

Rows = NDArray[np.intp]
Stage = Literal["prefill", "decode", "queue"]

MIN_RETRY_S: Final = 1.0
MAX_RETRY_S: Final = 60.0  # clients of OpenAI's libraries ignore what is longer
# Clients turned away together are told to come back over this much more than the shortest wait.
_SPREAD: Final = 0.25


@dataclass(frozen=True, slots=True)
class Rejection:
    """Why a request is not served now: HTTP 429 with ``Retry-After`` and the reason.

    ``load`` is what was predicted over what is acceptable to the objectives; 1 is just acceptable. ``key`` says
    whom a waiting room turned away; rules judge the request they were given and leave it None.
    """

    reason: str
    stage: Stage
    retry_after_s: float  # within [MIN_RETRY_S, MAX_RETRY_S]
    load: float
    key: Hashable = None


@dataclass(frozen=True, slots=True)
class DecodeSpeeds:
    """Decode step times of ranks, affine in batch and context (`InstanceClass`), learned corrections applied."""

    base_s: Floats
    s_per_sequence: Floats
    s_per_context_token: Floats

    def step_s(self, sequences: Floats, context_tokens: Floats) -> Floats:
        """Seconds of one step of every rank."""
        steps: Floats = (
            self.base_s + self.s_per_sequence * sequences + self.s_per_context_token * context_tokens
        )
        return steps


@dataclass(frozen=True, slots=True)
class Prospect:
    """What placing one request would mean, all of it predicted; times of one monotonic clock.

    ``ttft_s`` and ``tbt_s`` are those of the placement that the policy chose. ``decode_rows`` are the rows in
    the load table of the ranks that may decode the request, in the order of the candidates (`decode_positions`),
    and ``decode_speeds`` has one entry for each of them; both stay the same as long as the candidates do, so
    they can be kept per roster.
    """

    now_s: float
    ttft_s: float
    tbt_s: float
    ttft_objective_s: float
    tbt_objective_s: float
    prefill_end_s: float  # absolute; when the decode begins
    decode_rows: Rows
    decode_speeds: DecodeSpeeds

    @property
    def ttft_load(self) -> float:
        return self.ttft_s / self.ttft_objective_s

    @property
    def tbt_load(self) -> float:
        return self.tbt_s / self.tbt_objective_s

    def tbt_loads(self, carried: DecodeLoad, sequences: float, context_tokens: float) -> Floats:
        """Step over objective of every decode rank, with ``sequences`` and their context added to each."""
        rows = self.decode_rows
        steps = self.decode_speeds.step_s(
            carried.sequences[rows] + sequences, carried.context_tokens[rows] + context_tokens
        )
        loads: Floats = steps / self.tbt_objective_s
        return loads

    @property
    def table_rows(self) -> int:
        """Rows that a forecast has to cover."""
        return int(self.decode_rows.max()) + 1 if len(self.decode_rows) else 0


class AdmissionRule(Protocol):
    """Decides whether a request is served, at two moments; pure but for its parameters."""

    @property
    def name(self) -> str: ...

    def judge(
        self,
        request: PlacementRequest,
        candidates: Candidates,
        choice: Choice,
        prospect: Prospect,
        forecast: DecodeForecast,
    ) -> Rejection | None:
        """When the request arrived and the policy chose, before anything is reserved for it."""
        ...

    def judge_decode(
        self, request: PlacementRequest, prospect: Prospect, forecast: DecodeForecast
    ) -> Rejection | None:
        """When the prefill of a pair has ended, before it hands off.

        The prospect is one made now: ``decode_rows`` has the one row that was chosen, ``tbt_s`` is a step there
        with this request aboard. The forecast knows the placement, not started.
        """
        ...


def decode_positions(candidates: Candidates) -> Rows:
    """Indices into the candidates of the ranks that may decode; `Prospect.decode_rows` follows this order."""
    return np.flatnonzero(candidates.can_decode | candidates.is_mixed)


def retry_after_s(wait_s: float, request_id: str) -> float:
    """``wait_s`` within the bounds, spread by the request's id so that not all come back at once."""
    spread = 1.0 + _SPREAD * zlib.crc32(request_id.encode()) / 0xFFFFFFFF
    return min(max(wait_s * spread, MIN_RETRY_S), MAX_RETRY_S)


def calm_after_s(load_in: Callable[[float], float], limit: float) -> float:
    """Whole seconds until the load has fallen to ``limit``, at most MAX_RETRY_S.

    ``load_in(s)`` is the load in ``s`` seconds if nothing else arrives; it is taken to fall.
    """
    low, high = int(MIN_RETRY_S), int(MAX_RETRY_S)
    while low < high:
        middle = (low + high) // 2
        if load_in(float(middle)) <= limit:
            high = middle
        else:
            low = middle + 1
    return float(low)


def refuse_prefill(
    request: PlacementRequest,
    prospect: Prospect,
    *,
    ttft_s: float,
    queue_s: float,
    load: float,
    limit: float,
) -> Rejection:
    """TTFT too late: comes back when as much of the ``queue_s`` in front of it is worked off as has to be."""
    objective_s = prospect.ttft_objective_s
    alone_s = ttft_s - queue_s
    reason = (
        f"the cluster is overloaded: the first token is expected after {ttft_s:.2f} s, "
        f"objective {objective_s:g} s"
    )
    if alone_s > limit * objective_s:
        reason += f" (this prompt takes {alone_s:.2f} s without any queue)"
    wait_s = min(ttft_s - limit * objective_s, queue_s)
    return Rejection(reason, "prefill", retry_after_s(wait_s, request.request_id), load)


def refuse_decode(
    request: PlacementRequest,
    prospect: Prospect,
    *,
    load: float,
    limit: float,
    load_in: Callable[[float], float],
) -> Rejection:
    """TBT too slow: comes back when decodes have ended."""
    tbt_s = load * prospect.tbt_objective_s
    reason = (
        f"the cluster is overloaded: {1e3 * tbt_s:.1f} ms between tokens are expected, "
        f"objective {1e3 * prospect.tbt_objective_s:g} ms"
    )
    wait_s = calm_after_s(load_in, limit)
    return Rejection(reason, "decode", retry_after_s(wait_s, request.request_id), load)


def refuse_harm(
    request: PlacementRequest, prospect: Prospect, *, harm: float, load: float, answer_s: float
) -> Rejection:
    """Its prefill would slow answers down; comes back when as many have ended as last ``answer_s``."""
    reason = (
        f"the cluster is overloaded: {harm:.1f} answers under way would be slowed down beyond "
        f"{1e3 * prospect.tbt_objective_s:g} ms between tokens"
    )
    return Rejection(reason, "decode", retry_after_s(answer_s, request.request_id), load)


def finite(name: str, value: float, low: float, high: float = math.inf) -> None:
    """Raises ValueError unless ``low <= value <= high`` and finite: parameters of rules."""
    if not (math.isfinite(value) and low <= value <= high):
        bound = f"at least {low:g}" if high == math.inf else f"from {low:g} to {high:g}"
        raise ValueError(f"{name} must be {bound}, not {value!r}")
