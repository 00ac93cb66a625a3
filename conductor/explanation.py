"""Why a placement was made: every candidate, each term of its estimate, and what happened afterwards."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from conductor.placement import InstanceFailure, Placement, PlacementRequest, Usage
from conductor.policies import Candidates, Choice


@dataclass(slots=True)
class PlacementRecord:
    """A placement, what was known when it was made, and its course. Times are of the scheduler's clock."""

    placement: Placement
    request: PlacementRequest
    policy: str
    candidates: Candidates
    choice: Choice
    placed_s: float
    queue_s: float
    prefill_s: float
    prefill_finished_s: float | None = None
    first_token_s: float | None = None
    ended_s: float | None = None
    outcome: str = "running"
    usage: Usage | None = None
    failure: InstanceFailure | None = None

    def observed_ttft_s(self) -> float | None:
        """Placement to first byte of a streamed answer; None while unknown."""
        if self.first_token_s is None or not self.request.streamed:
            return None
        return self.first_token_s - self.placed_s


class RecordLog:
    """The latest placements, by id; the oldest leave when there are ``capacity``, or too many candidates.

    A record keeps all its candidates (about 80 bytes each), so in a large cluster memory bounds the log.
    """

    MAX_CANDIDATES = 500_000

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._candidates = 0
        self._records: OrderedDict[str, PlacementRecord] = OrderedDict()

    def add(self, record: PlacementRecord) -> None:
        self._records[record.placement.placement_id] = record
        self._candidates += len(record.candidates.ranks)
        while len(self._records) > 1 and (
            len(self._records) > self._capacity or self._candidates > self.MAX_CANDIDATES
        ):
            _, oldest = self._records.popitem(last=False)
            self._candidates -= len(oldest.candidates.ranks)

    def get(self, placement_id: str) -> PlacementRecord | None:
        return self._records.get(placement_id)

    def latest(self, limit: int) -> Iterator[PlacementRecord]:
        """Newest first."""
        for _, placement_id in zip(range(limit), reversed(self._records), strict=False):
            yield self._records[placement_id]


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 3)


def summarize(record: PlacementRecord, now_s: float) -> dict[str, Any]:
    """One line of `GET /v1/placements`."""
    placement, request = record.placement, record.request
    return {
        "placement_id": placement.placement_id,
        "request_id": placement.request_id,
        "model": placement.model,
        "age_s": round(now_s - record.placed_s, 3),
        "prefill_instance": placement.prefill.instance_id,
        "decode_instance": placement.decode.instance_id,
        "prompt_tokens": request.prompt_tokens,
        "overlap_tokens": placement.overlap_tokens,
        "predicted_ttft_ms": _ms(placement.predicted_ttft_s),
        "observed_ttft_ms": _ms(record.observed_ttft_s()),
        "outcome": record.outcome,
    }


def explain(record: PlacementRecord, now_s: float) -> dict[str, Any]:
    """The whole answer of `GET /v1/placements/{id}`."""
    placement, request, c = record.placement, record.request, record.candidates
    usage, failure = record.usage, record.failure
    return {
        **summarize(record, now_s),
        "policy": record.policy,
        "token_source": str(request.token_source),
        "retry_of": request.retry_of,
        "prefill_rank": placement.prefill.rank,
        "decode_rank": placement.decode.rank,
        "disaggregated": placement.disaggregated,
        "why": _why(record),
        "predicted": {
            "queue_ms": _ms(record.queue_s),
            "prefill_ms": _ms(record.prefill_s),
            "hand_off_ms": _ms(float(c.hand_off_s[record.choice.decode]) if placement.disaggregated else 0.0),
            "ttft_ms": _ms(placement.predicted_ttft_s),
            "tbt_ms": _ms(placement.predicted_tbt_s),
        },
        "observed": {
            "prefill_ms": _ms(_since(record.placed_s, record.prefill_finished_s)),
            "ttft_ms": _ms(record.observed_ttft_s()),
            "duration_ms": _ms(_since(record.placed_s, record.ended_s)),
            "prompt_tokens": usage.prompt_tokens if usage else None,
            "cached_tokens": usage.cached_tokens if usage else None,
            "output_tokens": usage.output_tokens if usage else None,
        },
        "failure": None
        if failure is None
        else {"instance": failure.instance_id, "kind": str(failure.kind), "detail": failure.detail},
        "objectives": {"ttft_ms": _ms(c.ttft_objective_s), "tbt_ms": _ms(c.tbt_objective_s)},
        "candidates": [_candidate(c, i) for i in range(len(c.ranks))],
        "excluded": c.excluded,
    }


def _since(start_s: float, end_s: float | None) -> float | None:
    return None if end_s is None else end_s - start_s


def _candidate(c: Candidates, i: int) -> dict[str, Any]:
    role = "prefill" if c.can_prefill[i] else "decode" if c.can_decode[i] else "mixed"
    return {
        "instance": c.ranks[i].target.instance_id,
        "rank": c.ranks[i].target.rank,
        "role": role,
        "overlap_tokens": int(c.overlap_tokens[i]),
        "queue_ms": _ms(float(c.queue_s[i])),
        "prefill_ms": _ms(float(c.prefill_s[i])),
        "ttft_ms": _ms(float(c.ttft_s[i])),
        "hand_off_ms": _ms(float(c.hand_off_s[i])) if role == "decode" else None,
        "tbt_ms": _ms(float(c.tbt_s[i])),
        "pending_prefills": int(c.pending_prefills[i]),
        "active_decodes": int(c.active_decodes[i]),
        "context_tokens": int(c.context_tokens[i]),
    }


def _why(record: PlacementRecord) -> str:
    """The choice in a sentence or two."""
    c, choice, placement = record.candidates, record.choice, record.placement
    parts = [
        f"{placement.prefill.instance_id} holds {placement.overlap_tokens} of "
        f"{record.request.prompt_tokens} prompt tokens and starts in {record.queue_s * 1e3:.1f} ms"
    ]
    best_overlap = int(c.overlap_tokens.max(initial=0))
    if best_overlap > placement.overlap_tokens:
        other = c.ranks[int(c.overlap_tokens.argmax())].target.instance_id
        parts.append(f"{other} holds {best_overlap} but would answer later or cannot prefill")
    if placement.disaggregated:
        parts.append(
            f"{placement.decode.instance_id} decodes with {int(c.active_decodes[choice.decode])} others "
            f"at {placement.predicted_tbt_s * 1e3:.1f} ms a token"
        )
    if record.request.retry_of is not None:
        parts.append(f"second attempt after placement {record.request.retry_of} failed")
    return "; ".join(parts) + "."
