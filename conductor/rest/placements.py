"""Routes of placements: ask for one, report on it, see why it was made."""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import StrEnum
from typing import Annotated, Any

from fastapi import APIRouter, HTTPException, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field, model_validator

from conductor.explanation import PlacementRecord, explain, plan_and_prediction, summarize
from conductor.placement import (
    FailureKind,
    InstanceFailure,
    PlacementError,
    PlacementRequest,
    RejectedError,
    TooLongError,
    UnknownModelError,
    Usage,
)
from conductor.rest import answers
from conductor.rest.bodies import documented_body, invalid, parsed
from conductor.rest.prompts import MOST_TOKENS, PlacementQuery, Tokenize, placement_request, prompt_document
from conductor.rest.reservations import Reservations
from conductor.scheduler import Scheduler

_RETRY_AFTER_S = 1


class ProgressEvent(StrEnum):
    """What happened to a placement."""

    PREFILL_FINISHED = "prefill_finished"
    FIRST_TOKEN = "first_token"
    FINISHED = "finished"
    CANCELLED = "cancelled"
    FAILED = "failed"


_OUTCOMES = {
    ProgressEvent.FINISHED: "finished",
    ProgressEvent.CANCELLED: "cancelled",
    ProgressEvent.FAILED: "failed",
}


TokenCount = Annotated[int, Field(ge=0, lt=MOST_TOKENS)]


class UsageReport(BaseModel):
    """What the engine reported."""

    model_config = ConfigDict(extra="forbid")

    prompt_tokens: TokenCount | None = None
    output_tokens: TokenCount | None = None
    cached_tokens: TokenCount | None = None


class FailureReport(BaseModel):
    """Which instance failed and how; `unreachable` takes it out until its health check succeeds again."""

    model_config = ConfigDict(extra="forbid")

    instance: Annotated[str, Field(min_length=1)]
    kind: FailureKind
    detail: str = ""


class ProgressReport(BaseModel):
    """One step of a placement's life; `usage` belongs to `finished`, `failure` to `failed`."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "examples": [
                {"event": "first_token"},
                {"event": "finished", "usage": {"output_tokens": 212, "cached_tokens": 1024}},
                {"event": "failed", "failure": {"instance": "p0", "kind": "timeout", "detail": "60 s"}},
            ]
        },
    )

    event: ProgressEvent
    usage: UsageReport | None = None
    failure: FailureReport | None = None

    @model_validator(mode="after")
    def _what_belongs_together(self) -> ProgressReport:
        if (self.event is ProgressEvent.FAILED) != (self.failure is not None):
            raise ValueError("failure must be given with the event failed, and with no other")
        if self.usage is not None and self.event is not ProgressEvent.FINISHED:
            raise ValueError("usage belongs to the event finished; leave it out")
        return self


def make_placement_routes(
    scheduler: Scheduler,
    clock: Callable[[], float],
    reservations: Reservations,
    tokenize: Tokenize | None,
) -> APIRouter:
    """`/placements` and below."""
    router = APIRouter(tags=["placements"])

    @router.post(
        "/placements",
        summary="Where should this request run?",
        **answers.documented(answers.Decision, 404, 422, 429, 503),
        openapi_extra=documented_body(PlacementQuery),
    )
    async def place(
        request: Request,
        dry_run: Annotated[bool, Query(description="Only say what would be decided.")] = False,
        explained: Annotated[bool, Query(alias="explain", description="Add all candidates.")] = False,
    ) -> Response:
        """Decides and reserves the load there. Report progress with `POST /v1/placements/{id}/progress`; a
        placement of which nothing is heard for `expires_in_s` is released."""
        query = parsed(PlacementQuery, await request.body())
        asked = placement_request(query, await _tokenized(query, tokenize, scheduler))
        _check_block_size(scheduler, asked)
        now_s = clock()
        try:
            if dry_run:
                record = scheduler.consider(asked, now_s)
            else:
                placement_id = scheduler.place(asked, now_s).placement_id
                reservations.made(placement_id)
                found = scheduler.find(placement_id)
                assert found is not None
                record = found
        except TooLongError as error:
            raise invalid("token_ids" if query.hashes is None else "prompt_tokens", str(error)) from None
        except PlacementError as error:
            raise _refused(error) from None
        answer = _decision(record, None if dry_run else reservations.ttl_s)
        if explained:
            answer["explanation"] = explain(record, now_s)
        return answers.json_answer(answer)

    @router.post(
        "/placements/{placement_id}/progress",
        summary="Report progress of a placement",
        **answers.documented(answers.Progress, 404, 409, 422, 429),
        openapi_extra=documented_body(ProgressReport),
    )
    async def report(placement_id: str, request: Request) -> Response:
        """Steps come in order, and any may be left out; the same one again changes nothing. `finished`,
        `cancelled` and `failed` end the placement and release its reservation."""
        report = parsed(ProgressReport, await request.body())
        record = _known(scheduler, placement_id)
        repeated = _repeated(record, report.event)
        if not repeated:
            if record.ended_s is not None:
                raise HTTPException(
                    409,
                    f"placement {placement_id!r} has ended ({record.outcome}); {report.event} cannot follow",
                )
            try:
                _apply(scheduler, placement_id, report, clock())
            except PlacementError as error:  # its decode would miss its objective: it has ended
                reservations.ended(placement_id)
                raise _refused(error) from None
        if report.event in _OUTCOMES:
            reservations.ended(placement_id)
        else:
            reservations.heard_of(placement_id)
        return answers.json_answer(
            {"placement_id": placement_id, "outcome": record.outcome, "repeated": repeated}
        )

    @router.get(
        "/placements",
        summary="The latest placements, newest first",
        **answers.documented(answers.Placements, 422),
    )
    async def placements(
        limit: Annotated[int, Query(ge=1, le=1000, description="How many at most.")] = 50,
    ) -> Response:
        """As many as `scheduling.records` keeps; of placements over many instances, fewer."""
        now_s = clock()
        return answers.json_answer(
            {"placements": [summarize(each, now_s) for each in scheduler.records.latest(limit)]}
        )

    @router.get(
        "/placements/{placement_id}",
        summary="Why was this placement made, and how did it go?",
        **answers.documented(answers.Explanation, 404, 422),
    )
    async def placement(
        placement_id: str,
        limit: Annotated[
            int | None, Query(ge=1, description="Only so many candidates, the best by TTFT.")
        ] = None,
    ) -> Response:
        """Every candidate with each term of its estimate and what ruled it out, best TTFT first; what the
        policy `slo` chooses among them, and what it would have chosen without this prefill instance."""
        return answers.json_answer(explain(_known(scheduler, placement_id), clock(), limit))

    return router


async def _tokenized(query: PlacementQuery, tokenize: Tokenize | None, scheduler: Scheduler) -> Any:
    document = prompt_document(query)
    if document is None:
        return None
    try:
        scheduler.check_served(query.model)  # of another model no tokenizer could tell why it fails
    except PlacementError as error:
        raise _refused(error) from None
    tokenized = await tokenize(document) if tokenize is not None else None
    if tokenized is None:
        form = "text" if query.text is not None else "messages"
        raise invalid(
            form,
            f"there is no tokenizer for {query.model!r} here, or it failed (its log says why); give "
            "token_ids, or hashes with block_size and prompt_tokens",
        )
    return tokenized


def _check_block_size(scheduler: Scheduler, asked: PlacementRequest) -> None:
    """Hashes of blocks that no engine caches would silently find nothing."""
    if asked.hashes is None:
        return
    model = scheduler.aliases.get(asked.model, asked.model)
    sizes = {i.block_size for i in scheduler.cluster if i.serves(model)} - {None}
    if sizes and asked.hashes_block_size not in sizes:
        known = ", ".join(str(size) for size in sorted(size for size in sizes if size is not None))
        raise invalid(
            "block_size",
            f"no instance of {asked.model!r} caches blocks of {asked.hashes_block_size} tokens; "
            f"give hashes of blocks of {known} tokens",
        )


def _refused(error: PlacementError) -> HTTPException:
    if isinstance(error, UnknownModelError):
        return HTTPException(404, f"model: {error}")
    if isinstance(error, RejectedError):
        seconds = str(max(math.ceil(error.retry_after_s), 1))
        return HTTPException(429, f"{error} (stage: {error.stage})", headers={"retry-after": seconds})
    return HTTPException(503, str(error), headers={"retry-after": str(_RETRY_AFTER_S)})


def _known(scheduler: Scheduler, placement_id: str) -> PlacementRecord:
    record = scheduler.find(placement_id)
    if record is None:
        raise HTTPException(
            404, f"placement {placement_id!r} is not known; only the latest are kept (scheduling.records)"
        )
    return record


def _repeated(record: PlacementRecord, event: ProgressEvent) -> bool:
    """Whether that was reported before."""
    if event is ProgressEvent.PREFILL_FINISHED:
        return record.prefill_finished_s is not None
    if event is ProgressEvent.FIRST_TOKEN:
        return record.first_token_s is not None
    return record.outcome == _OUTCOMES[event]


def _apply(scheduler: Scheduler, placement_id: str, report: ProgressReport, now_s: float) -> None:
    if report.event is ProgressEvent.PREFILL_FINISHED:
        scheduler.prefill_finished(placement_id, now_s)
    elif report.event is ProgressEvent.FIRST_TOKEN:
        scheduler.first_token(placement_id, now_s)
    elif report.event is ProgressEvent.FINISHED:
        usage = report.usage or UsageReport()
        scheduler.finished(
            placement_id, now_s, Usage(usage.prompt_tokens, usage.output_tokens, usage.cached_tokens)
        )
    elif report.event is ProgressEvent.CANCELLED:
        scheduler.cancelled(placement_id, now_s)
    else:
        failure = report.failure
        assert failure is not None
        scheduler.failed(placement_id, now_s, InstanceFailure(failure.instance, failure.kind, failure.detail))


def _decision(record: PlacementRecord, expires_in_s: float | None) -> dict[str, Any]:
    placement, request = record.placement, record.request
    return {
        "placement_id": placement.placement_id or None,
        "request_id": request.request_id,
        "model": placement.model,
        "policy": record.policy,
        "prefill_instance": placement.prefill.instance_id,
        "prefill_rank": placement.prefill.rank,
        "prefill_url": placement.prefill.url,
        "decode_instance": placement.decode.instance_id,
        "decode_rank": placement.decode.rank,
        "decode_url": placement.decode.url,
        "disaggregated": placement.disaggregated,
        "protocol": placement.prefill.protocol,
        "prompt_tokens": request.prompt_tokens,
        "token_source": str(request.token_source),
        "overlap_tokens": placement.overlap_tokens,
        "expires_in_s": expires_in_s,
        **plan_and_prediction(record),
    }
