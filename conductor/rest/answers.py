"""Shapes of the answers, for OpenAPI. Handlers return plain JSON; tests hold that it has these shapes."""

from __future__ import annotations

from typing import Any

import orjson
from fastapi import Response
from pydantic import BaseModel, ConfigDict


class Answer(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ErrorBody(Answer):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(Answer):
    """What every error looks like; `param` names the field."""

    error: ErrorBody


class Segment(Answer):
    """Prompt tokens that come out of one holder's tier."""

    start_token: int
    stop_token: int
    holder: str
    rank: int
    tier: str


class Plan(Answer):
    segments: list[Segment]
    computed_tokens: int


class Prediction(Answer):
    queue_ms: float
    fetch_ms: float
    prefill_ms: float
    hand_off_ms: float
    ttft_ms: float
    tbt_ms: float
    output_tokens: int
    wait_for_memory_ms: float | None = None
    inflicted_ms: float | None = None
    eviction_ms: float | None = None
    harmed_requests: float | None = None


class Observation(Answer):
    prefill_ms: float | None
    ttft_ms: float | None
    duration_ms: float | None
    prompt_tokens: int | None
    cached_tokens: int | None
    output_tokens: int | None


class Candidate(Answer):
    """One rank, with every term of its estimate at the moment of the decision."""

    instance: str
    rank: int
    role: str
    chosen_for: list[str]
    ruled_out: list[str]
    fits: bool
    kv_capacity_tokens: int
    overlap_tokens: int
    cached_tokens: dict[str, int]
    plan_tokens: int
    plan_peer: str | None
    queue_ms: float
    fetch_ms: float
    prefill_ms: float
    ttft_ms: float
    inflicted_ms: float
    eviction_ms: float
    harmed_requests: float
    hand_off_ms: float | None
    wait_for_memory_ms: float
    tbt_ms: float


class Alternative(Answer):
    prefill_instance: str
    decode_instance: str
    ttft_ms: float
    tbt_ms: float


class Summary(Answer):
    """One line of the list of placements."""

    placement_id: str
    request_id: str
    model: str
    age_s: float
    prefill_instance: str
    decode_instance: str
    prompt_tokens: int
    overlap_tokens: int
    reused_tokens: dict[str, int]
    predicted_ttft_ms: float
    observed_ttft_ms: float | None
    outcome: str


class Explanation(Summary):
    """Why, and what became of it. What needs the candidates is missing once they have left the log."""

    policy: str
    token_source: str
    token_fallback: str | None
    tenant: str
    route: str
    session: str | None
    priority: int
    retry_of: str | None
    hedge_of: str | None
    prefill_rank: int
    decode_rank: int
    disaggregated: bool
    held_ms: float
    plan: Plan
    predicted: Prediction
    observed: Observation
    failure: dict[str, str] | None
    why: str | None = None
    objectives: dict[str, float] | None = None
    counterfactual: dict[str, Alternative | None] | None = None
    candidates_total: int | None
    candidates: list[Candidate] | None
    excluded: dict[str, str] | None = None


class Decision(Answer):
    """Where the request should run. `placement_id` and `expires_in_s` are null for a dry run."""

    placement_id: str | None
    request_id: str
    model: str
    policy: str
    prefill_instance: str
    prefill_rank: int
    prefill_url: str
    decode_instance: str
    decode_rank: int
    decode_url: str
    disaggregated: bool
    protocol: str
    prompt_tokens: int
    token_source: str
    overlap_tokens: int
    expires_in_s: float | None
    plan: Plan
    predicted: Prediction
    explanation: Explanation | None = None


class Placements(Answer):
    placements: list[Summary]


class Progress(Answer):
    placement_id: str
    outcome: str
    repeated: bool


class Reported(Answer):
    running: int
    waiting: int
    kv_usage: float
    preemptions: int | None
    age_s: float


class Rank(Answer):
    rank: int
    placements: int
    pending_prefills: int
    queue_ms: float
    active_decodes: int
    context_tokens: int
    cached_blocks: dict[str, int]
    reported: Reported | None


class Instance(Answer):
    id: str
    url: str
    role: str
    health: str
    health_reason: str
    draining: bool
    source: str | None
    registration_expires_in_s: float | None
    models: list[str]
    block_size: int | None
    kv_capacity_blocks: int | None
    publishes_kv_events: bool | None
    instance_class: str
    protocol: str
    location: str
    prefill_scale: float
    ranks: list[Rank]


class Instances(Answer):
    instances: list[Instance]


class Heartbeat(Answer):
    id: str
    expires_in_s: float


class DiscoverySource(Answer):
    """`refused`: what it lists and is left out, and why. `synced_s_ago`: when it was last heard."""

    source: str
    reads: str
    instances: list[str]
    refused: dict[str, str]
    synced_s_ago: float | None
    error: str | None
    failures: int
    changes: dict[str, int]


class Discovery(Answer):
    sources: list[DiscoverySource]


class InstanceRemoval(Answer):
    id: str
    status: str
    placements_under_way: int


class Cluster(Answer):
    instances: dict[str, Any]
    models: list[dict[str, Any]]
    policy: str
    objectives: dict[str, float]
    now: dict[str, float | int | None]
    window: dict[str, Any]


class Loads(Answer):
    """`fields` names the columns of `instances`."""

    fields: list[str]
    instances: list[list[Any]]


class History(Answer):
    step_s: float
    objectives: dict[str, float]
    points: list[dict[str, Any]]


class Problem(Answer):
    severity: str
    kind: str
    says: str
    remedy: str
    instances: list[str]


class Problems(Answer):
    problems: list[Problem]


class LearnedFactor(Answer):
    factor: float
    observations: int


class ClassCalibration(Answer):
    """`ttft` and `tbt` set the latest predictions beside what was observed."""

    instances: int
    prefill: LearnedFactor
    decode: LearnedFactor
    ttft: dict[str, float | int]
    tbt: dict[str, float | int]


class Calibrations(Answer):
    limits: dict[str, float]
    classes: dict[str, ClassCalibration]


class Evidence(Answer):
    name: str
    value: float | None
    unit: str
    limit: float | None


class Finding(Answer):
    cause: str
    limits: bool | None
    says: str
    basis: str
    evidence: list[Evidence]
    remedy: str


class Diagnosis(Answer):
    limit: str | None
    summary: str
    window_s: float
    findings: list[Finding]


class ActionPlace(Answer):
    instance: str
    rank: int
    tier: str


class ActionStatus(Answer):
    """`partial`: done, but the source had lost some of the blocks. Seconds of time, bytes of KV."""

    id: str
    kind: str
    state: str
    partial: bool
    detail: str
    reason: str
    ordered: bool
    model: str | None
    source: ActionPlace | None
    target: ActionPlace
    start_block: int
    stop_block: int
    blocks_done: int
    kv_bytes: int
    executor: str | None
    attempts: int
    benefit_s: float
    cost_s: float
    age_s: float
    ran_s: float | None
    deadline_in_s: float


class ActionsTaken(Answer):
    actions: list[ActionStatus]


class Actions(Answer):
    counts: dict[str, int]
    actions: list[ActionStatus]


_ERRORS = {
    404: "It does not exist; the message says what does.",
    409: "It has ended already, or is another's; the message says how.",
    422: "A field is missing, unknown or out of range; `param` names it.",
    429: "Admission turned the request away; `retry-after` says when to come back, the message why.",
    503: "No instance can take the request now; `retry-after` is set.",
}


Responses = dict[int | str, dict[str, Any]]


def documented(answer: type[Answer], *errors: int, status: int = 200, text: str = "") -> dict[str, Any]:
    """Keyword arguments of a route: what it answers, and its error responses."""
    responses: Responses = {status: {"model": answer, **({"description": text} if text else {})}}
    return {"responses": responses | refusals(*errors), "response_model": None, "status_code": status}


def refusals(*errors: int) -> Responses:
    """Error responses by status, as a route takes them."""
    return {code: {"model": ErrorAnswer, "description": _ERRORS[code]} for code in errors}


def json_answer(content: dict[str, Any], status: int = 200) -> Response:
    """Without the pass through pydantic that a large answer would take longest in."""
    return Response(orjson.dumps(content), status_code=status, media_type="application/json")
