"""Why a placement was made: every candidate, each term of its estimate, and what happened afterwards."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import replace

from cache_index import Tier
from conductor.costs import Floats, Ints
from conductor.costs.tables import DECODE, MIXED, PREFILL, TIER_RATIO
from conductor.estimates import Estimates, roles_for
from conductor.placement import InstanceFailure, Placement, PlacementRequest, PlanSegment, Usage
from conductor.policies.candidates import NO_PEER, Candidates, Choice
from conductor.policies.slo import Slo
from conductor.prefix_plan import hand_off_s, plan_of, predicted_ttft_s
from conductor.rank import RankState
from conductor.roster import CacheGroup, Roster

KEPT_TOKENS = 512  # of a prompt that was answered: more, in each of thousands of records, is much memory
_NO_TOKENS = np.empty(0, np.uint32)


class PlacementRecord(msgspec.Struct, gc=False):
    """A placement, what was known when it was made, and its course. Times are of the scheduler's clock."""

    placement: Placement
    request: PlacementRequest
    policy: str
    roster: Roster
    block: Floats | None  # of the estimates; None once the record has left the log
    ttft_objective_s: float  # what was left of it
    tbt_objective_s: float
    prefill_at: int  # in the roster, as the two next
    decode_at: int
    peer_at: int
    placed_s: float
    queue_s: float
    hand_off_s: float
    output_tokens: int  # predicted
    beginning: int | None  # of the prompt
    prefill_factor: float  # the learned one that the prefill was predicted with
    long_steps: bool  # those that carry the prefill may last longer than the TBT objective
    skips_prefill: bool  # a decode instance computes what it lacks of the prompt itself, without a hand-off
    held_by_decode: int  # of the prompt, on the decode rank's device, in tokens
    decoding: int  # requests that were on the decode rank before this one
    prefill: RankState
    decode: RankState
    cache_group: CacheGroup | None  # of the prefill rank
    peer: RankState | None  # that the plan fetches from
    held_s: float = 0.0  # from the request's arrival to its placement
    transfer: tuple[RankState, RankState] | None = None  # giver and taker of what is on a link now
    prefill_finished_s: float | None = None
    first_token_s: float | None = None
    step_at_first_token_s: float | None = None  # decode step predicted at that moment
    raw_step_at_first_token_s: float | None = None  # the same without the learned factor
    ended_s: float | None = None
    outcome: str = "running"
    usage: Usage | None = None
    failure: InstanceFailure | None = None
    ticket: int = 0  # what the books of its ranks know it by

    @property
    def candidates(self) -> Estimates | None:
        """What was estimated; None once the record has left the log."""
        if self.block is None:
            return None
        return Estimates(
            self.request,
            self.roster,
            self.block,
            self.placed_s,
            self.output_tokens,
            self.ttft_objective_s,
            self.tbt_objective_s,
            roles_for(self.request, self.roster),
        )

    def forget_prompt(self) -> None:
        """It has ended: of a prompt that is long, nobody will ask for the tokens."""
        request = self.request
        if len(request.tokens) > KEPT_TOKENS:
            self.request = replace(request, tokens=_NO_TOKENS, known_hashes={})

    @property
    def choice(self) -> Choice:
        """Of the policy."""
        return Choice(self.prefill_at, self.decode_at, self.peer_at)

    def observed_ttft_s(self) -> float | None:
        """Placement to first byte of a streamed answer; None while unknown."""
        if self.first_token_s is None or not self.request.streamed:
            return None
        return self.first_token_s - self.placed_s


_ROLE_NAMES = {PREFILL: "prefill", DECODE: "decode", MIXED: "mixed", 0: "none"}


class RecordLog:
    """The latest placements, by id; the oldest leave when there are ``capacity``, or too many candidates.

    A record keeps the estimates of all its candidates, 116 bytes each: in a large cluster, memory bounds the log.
    With a ``capacity`` of 0 none is kept.
    """

    MAX_CANDIDATES = 200_000

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._candidates = 0
        self._records: deque[PlacementRecord] = deque()  # which is filled faster than a dict

    def add(self, record: PlacementRecord) -> Sequence[Floats]:
        """Returns the blocks of the records that left: its own if none are kept.

        Ids count up behind a prefix.
        """
        block = record.block
        assert block is not None
        if not self._capacity:
            record.block = None
            return (block,)
        records = self._records
        records.append(record)
        self._candidates += len(record.roster.ranks)
        left: list[Floats] = []
        while (len(records) > self._capacity or self._candidates > self.MAX_CANDIDATES) and len(records) > 1:
            oldest = records.popleft()
            block, oldest.block = oldest.block, None
            assert block is not None
            self._candidates -= len(oldest.roster.ranks)
            left.append(block)
        return left

    def get(self, placement_id: str) -> PlacementRecord | None:
        records = self._records
        at = bisect_left(records, _counted(placement_id), key=lambda r: _counted(r.placement.placement_id))
        if at < len(records) and records[at].placement.placement_id == placement_id:
            return records[at]
        return None

    def latest(self, limit: int) -> Iterator[PlacementRecord]:
        """Newest first."""
        return islice(reversed(self._records), limit)


def _counted(placement_id: str) -> tuple[int, str]:
    """By which ids that count up are in order."""
    return len(placement_id), placement_id


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
        "reused_tokens": _reused(placement),
        "predicted_ttft_ms": _ms(placement.predicted_ttft_s),
        "observed_ttft_ms": _ms(record.observed_ttft_s()),
        "outcome": record.outcome,
    }


def _reused(placement: Placement) -> dict[str, int]:
    """Prompt tokens that the plan does not compute, by the tier that they come from."""
    tokens: dict[str, int] = {}
    for segment in placement.plan.segments:
        tier = segment.tier.name.lower()
        tokens[tier] = tokens.get(tier, 0) + segment.stop - segment.start
    return tokens


def explain(record: PlacementRecord, now_s: float, limit: int | None = None) -> dict[str, Any]:
    """The whole answer of `GET /v1/placements/{id}`: the candidates by TTFT, the best ``limit`` of them.

    Of a record that has left its log, what does not need the candidates.
    """
    c = record.candidates
    if c is None:
        return {**_course(record, now_s), "candidates": None, "candidates_total": None}
    order = np.argsort(c.ttft_s, kind="stable")[:limit]
    return {
        **_course(record, now_s),
        "why": _why(record, c),
        "predicted": {
            **plan_and_prediction(record)["predicted"],
            "wait_for_memory_ms": _ms(float(c.wait_s[record.choice.decode])),
            "inflicted_ms": _ms(float(c.inflicted_s[record.choice.prefill])),
            "eviction_ms": _ms(float(c.eviction_s[record.choice.prefill])),
            "harmed_requests": round(float(c.harm[record.choice.prefill]), 4),
        },
        "objectives": {"ttft_ms": _ms(c.ttft_objective_s), "tbt_ms": _ms(c.tbt_objective_s)},
        "counterfactual": _counterfactual(record, c),
        "candidates_total": len(c.ranks),
        "candidates": _candidates(record, c, order),
        "excluded": c.excluded,
    }


def plan_and_prediction(record: PlacementRecord) -> dict[str, Any]:
    """What a placement intends, and what that should cost."""
    placement = record.placement
    return {
        "plan": {
            "segments": [
                {
                    "start_token": segment.start,
                    "stop_token": segment.stop,
                    "holder": segment.holder.instance_id,
                    "rank": segment.holder.rank,
                    "tier": segment.tier.name.lower(),
                }
                for segment in placement.plan.segments
            ],
            "computed_tokens": record.request.prompt_tokens - placement.plan.tokens,
        },
        "predicted": {
            "queue_ms": _ms(record.queue_s),
            "fetch_ms": _ms(placement.plan.fetch_s),
            "prefill_ms": _ms(placement.plan.prefill_s),
            "hand_off_ms": _ms(record.hand_off_s),
            "ttft_ms": _ms(placement.predicted_ttft_s),
            "tbt_ms": _ms(placement.predicted_tbt_s),
            "output_tokens": record.output_tokens,
        },
    }


def _course(record: PlacementRecord, now_s: float) -> dict[str, Any]:
    """All that is known of a placement without its candidates."""
    placement, request = record.placement, record.request
    usage, failure = record.usage, record.failure
    return {
        **summarize(record, now_s),
        "policy": record.policy,
        "token_source": str(request.token_source),
        "token_fallback": request.token_fallback,
        "tenant": request.tenant,
        "route": request.route,
        "session": request.session,
        "priority": request.priority,
        "retry_of": request.retry_of,
        "hedge_of": request.hedge_of,
        "prefill_rank": placement.prefill.rank,
        "decode_rank": placement.decode.rank,
        "disaggregated": placement.disaggregated,
        "held_ms": _ms(record.held_s),
        **plan_and_prediction(record),
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
    }


def _since(start_s: float, end_s: float | None) -> float | None:
    return None if end_s is None else end_s - start_s


def _candidates(record: PlacementRecord, c: Candidates, positions: Ints) -> list[dict[str, Any]]:
    """Every term of the estimates of the ranks at ``positions``, and what these were and could not be chosen for.

    All of it as it was at the decision; O(ranks), for columns are gathered whole.
    """
    names = [rank.target.instance_id for rank in c.ranks]
    columns: dict[str, list[Any]] = {
        "instance": [names[i] for i in positions.tolist()],
        "rank": [c.ranks[i].target.rank for i in positions.tolist()],
        "role": [_ROLE_NAMES[role] for role in c.roles[positions].tolist()],
        "chosen_for": _chosen_for(record, positions),
        "ruled_out": _ruled_out(c, positions),
        "fits": c.fits[positions].tolist(),
        "kv_capacity_tokens": c.kv_capacity_tokens[positions].tolist(),
        "overlap_tokens": c.overlap_tokens[positions].tolist(),
        "cached_tokens": [_by_tier(held) for held in c.local_tokens[:, positions].T.tolist()],
        "plan_tokens": c.plan_tokens[positions].tolist(),
        "plan_peer": [names[i] if i != NO_PEER else None for i in c.plan_peer[positions].tolist()],
        "queue_ms": _all_ms(c.queue_s[positions]),
        "fetch_ms": _all_ms(c.plan_fetch_s[positions]),
        "prefill_ms": _all_ms(c.prefill_s[positions]),
        "ttft_ms": _all_ms(c.ttft_s[positions]),
        "inflicted_ms": _all_ms(c.inflicted_s[positions]),
        "eviction_ms": _all_ms(c.eviction_s[positions]),
        "harmed_requests": c.harm[positions].round(4).tolist(),
        "hand_off_ms": [
            ms if role == DECODE else None
            for ms, role in zip(_all_ms(c.hand_off_s[positions]), c.roles[positions].tolist(), strict=True)
        ],
        "wait_for_memory_ms": _all_ms(c.wait_s[positions]),
        "tbt_ms": _all_ms(c.tbt_s[positions]),
    }
    return [dict(zip(columns, told, strict=True)) for told in zip(*columns.values(), strict=True)]


def _all_ms(seconds: Floats) -> list[float]:
    milliseconds: list[float] = (seconds * 1e3).round(3).tolist()
    return milliseconds


def _by_tier(tokens: list[int]) -> dict[str, int]:
    return {tier.name.lower(): held for tier, held in zip(Tier, tokens, strict=True)}


def _chosen_for(record: PlacementRecord, positions: Ints) -> list[list[str]]:
    legs = (("prefill", record.choice.prefill), ("decode", record.choice.decode))
    return [[leg for leg, chosen in legs if chosen == i] for i in positions.tolist()]


def _ruled_out(c: Candidates, positions: Ints) -> list[list[str]]:
    """Why the ranks could not have been chosen."""
    prefilling = frozenset(c.protocol[c.can_prefill].tolist())
    decoding = frozenset(c.protocol[c.can_decode].tolist())

    def reasons(role: int, protocol: int, fits: bool, capacity_tokens: int) -> Iterator[str]:
        if not role:
            yield "another prefill rank was asked for"
        if not fits:
            yield f"the prompt does not fit into {capacity_tokens} tokens of KV memory"
        if role == PREFILL and protocol not in decoding:
            yield "no decode rank of its hand-off protocol"
        if role == DECODE and protocol not in prefilling:
            yield "no prefill rank of its hand-off protocol"

    columns = (c.roles, c.protocol, c.fits, c.kv_capacity_tokens)
    facts = zip(*(column[positions].tolist() for column in columns), strict=True)
    return [list(reasons(*each)) for each in facts]


def _counterfactual(record: PlacementRecord, c: Candidates) -> dict[str, Any]:
    """What `slo` chooses among these candidates, and what it would have chosen had the prefill rank been away."""
    roles = c.roles.copy()
    roles[record.choice.prefill] = 0
    without = c.with_roles(roles)
    slo = Slo()
    return {"slo": _outcome(slo.choose(c), c), "without_this_prefill": _outcome(slo.choose(without), without)}


def _outcome(choice: Choice | None, c: Candidates) -> dict[str, Any] | None:
    if choice is None:
        return None
    moving_s = hand_off_s(c, choice.prefill, choice.decode)
    return {
        "prefill_instance": c.ranks[choice.prefill].target.instance_id,
        "decode_instance": c.ranks[choice.decode].target.instance_id,
        "ttft_ms": _ms(predicted_ttft_s(c, choice, plan_of(c, choice), moving_s)),
        "tbt_ms": _ms(float(c.tbt_s[choice.decode])),
    }


def _why(record: PlacementRecord, c: Candidates) -> str:
    """The choice in a sentence or two."""
    placement = record.placement
    parts = [
        f"{placement.prefill.instance_id} holds {placement.overlap_tokens} of "
        f"{record.request.prompt_tokens} prompt tokens and starts in {record.queue_s * 1e3:.1f} ms"
    ]
    for segment in placement.plan.segments:
        if segment.tier is not Tier.DEVICE or segment.holder != record.prefill.holder:
            parts.append(
                f"{segment.stop - segment.start} tokens come from the {segment.tier.name.lower()} tier of "
                f"{segment.holder.instance_id}{_encoded(record, segment)}"
            )
    best_overlap = int(c.overlap_tokens.max(initial=0))
    if best_overlap > placement.overlap_tokens:
        other = c.ranks[int(c.overlap_tokens.argmax())].target.instance_id
        parts.append(f"{other} holds {best_overlap} but would answer later or cannot prefill")
    if placement.disaggregated:
        parts.append(
            f"{placement.decode.instance_id} decodes with {record.decoding} others "
            f"at {placement.predicted_tbt_s * 1e3:.1f} ms a token"
        )
    if record.skips_prefill:
        computed = record.request.prompt_tokens - placement.plan.tokens
        parts.append(f"it decodes, and computes the other {computed} tokens itself, which saves a hand-off")
    if record.request.retry_of is not None:
        parts.append(f"second attempt after placement {record.request.retry_of} failed")
    if record.request.hedge_of is not None:
        parts.append(f"asked beside placement {record.request.hedge_of}, which was late")
    return "; ".join(parts) + "."


def _encoded(record: PlacementRecord, segment: PlanSegment) -> str:
    """How a store has what a plan loads from it; nothing of what is raw, as all is that comes from a peer."""
    c, rank = record.candidates, record.choice.prefill
    if c is None or segment.holder != record.prefill.holder:
        return ""
    ratio = float(c.tables.classes[c.roster.class_ids[rank], TIER_RATIO + segment.tier])
    return "" if ratio <= 1.0 else f", encoded to 1/{ratio:g} and decoded beside the load"
