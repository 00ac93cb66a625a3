"""``POST /v1/events``: cache events over HTTP, for stores and connectors that have no ZeroMQ publisher.

The body is one event or a list of them, in the envelope of RFC #1527.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import orjson
from fastapi import APIRouter, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, field_validator

from cache_index.cache_events import CacheEvent
from cache_index.events import MalformedEventError
from cache_index.push_ingest import Gap, PushIngest
from cache_index.residency import Holder, Tier

MAX_EVENTS = 10_000

BlockHash = Annotated[int, Field(ge=-(2**63), lt=2**64)]  # signed ones are taken as their unsigned form
TokenId = Annotated[int, Field(ge=0, lt=2**32)]


class _Envelope(BaseModel):
    # Fields of later versions of the RFC must not turn a working publisher away.
    model_config = ConfigDict(extra="ignore")

    event_id: Annotated[int, Field(ge=0)]
    timestamp: float | None = None
    model_name: Annotated[str, Field(min_length=1)] | None = None
    block_size: Annotated[int, Field(gt=0, le=65_536)] | None = None
    additional_salt: str | None = None
    lora_name: str | None = None
    tenant_id: str | None = None
    backend_id: Annotated[str, Field(min_length=1)]
    medium: str | None = None
    dp_rank: Annotated[int, Field(ge=0, lt=65_536)] | None = None

    @field_validator("medium")
    @classmethod
    def _known_medium(cls, medium: str | None) -> str | None:
        if medium is not None:
            Tier.parse(medium)
        return medium

    def _event(self, kind: Literal["stored", "removed", "cleared"], **details: Any) -> CacheEvent:
        return CacheEvent(
            event_id=self.event_id,
            kind=kind,
            backend_id=self.backend_id,
            rank=self.dp_rank or 0,
            tenant=self.tenant_id or "default",
            model=self.model_name,
            block_size=self.block_size,
            lora=self.lora_name,
            salt=self.additional_salt,
            tier=None if self.medium is None else Tier.parse(self.medium),
            timestamp=self.timestamp,
            **details,
        )


class StoredEvent(_Envelope):
    """Consecutive blocks of one chain are in a medium now."""

    event_type: Literal["stored"]
    model_name: Annotated[str, Field(min_length=1)]
    block_size: Annotated[int, Field(gt=0, le=65_536)]
    seq_hashes: Annotated[list[BlockHash], Field(min_length=1)]
    base_block_idx: Annotated[int, Field(ge=0)] | None = None
    parent_hash: BlockHash | None = None
    token_ids: list[TokenId] | None = None

    def to_event(self) -> CacheEvent:
        return self._event(
            "stored",
            names=_unsigned(self.seq_hashes),
            parent=None if self.parent_hash is None else _unsigned([self.parent_hash])[0],
            base_block_idx=self.base_block_idx,
            token_ids=None if self.token_ids is None else tuple(self.token_ids),
        )


class RemovedEvent(_Envelope):
    """Blocks have left a medium."""

    event_type: Literal["removed"]
    model_name: Annotated[str, Field(min_length=1)]
    seq_hashes: Annotated[list[BlockHash], Field(min_length=1)]

    def to_event(self) -> CacheEvent:
        return self._event("removed", names=_unsigned(self.seq_hashes))


class ClearedEvent(_Envelope):
    """Everything the publisher told of a medium is gone; without ``medium``, of all media."""

    event_type: Literal["cleared"]

    def to_event(self) -> CacheEvent:
        return self._event("cleared")


PushedEvent = Annotated[StoredEvent | RemovedEvent | ClearedEvent, Field(discriminator="event_type")]
_events: TypeAdapter[StoredEvent | RemovedEvent | ClearedEvent] = TypeAdapter(PushedEvent)


class RejectedEvent(BaseModel):
    """Why an event was not applied. ``index`` is its position in the body."""

    index: int
    event_id: int | None
    field: str
    reason: str


class MissingEvents(BaseModel):
    """Ids ``expected`` to ``received - 1`` never came; what the publisher had told before was dropped."""

    backend_id: str
    dp_rank: int
    expected: int
    received: int


class PushAnswer(BaseModel):
    """What became of the events of one request."""

    applied: int = 0
    duplicates: int = 0
    gaps: list[MissingEvents] = []
    rejected: list[RejectedEvent] = []


def make_push_router(ingest: PushIngest) -> APIRouter:
    """Routes under /v1. Answers 200 when all events are good, 207 when some are, 422 when none is."""
    router = APIRouter(prefix="/v1", tags=["cache events"])

    @router.post(
        "/events",
        summary="Report cache events (RFC #1527): one, or a list in order",
        response_model=PushAnswer,
        responses={
            207: {"model": PushAnswer, "description": "Some events are good."},
            422: {"model": PushAnswer, "description": "No event is good."},
        },
        openapi_extra={"requestBody": {"content": {"application/json": {"schema": {"type": "object"}}}}},
    )
    async def push(request: Request) -> JSONResponse:
        """Event ids grow by one per publisher (``backend_id`` and ``dp_rank``); known ones are ignored."""
        body = await request.body()
        return _answer(await run_in_threadpool(_take, ingest, body))  # thousands of blocks take their time

    return router


def _take(ingest: PushIngest, body: bytes) -> PushAnswer:
    try:
        content = orjson.loads(body)
    except ValueError as error:
        return PushAnswer(rejected=[_rejection(0, None, "body", f"is no JSON: {error}")])
    items = content if isinstance(content, list) else [content]
    if len(items) > MAX_EVENTS:
        reason = f"has {len(items)} events, at most {MAX_EVENTS} are taken at once"
        return PushAnswer(rejected=[_rejection(0, None, "body", reason)])
    with ingest.lock:
        return _apply(ingest, items)


def _apply(ingest: PushIngest, items: list[Any]) -> PushAnswer:
    answer = PushAnswer()
    unplaced = 0
    for index, item in enumerate(items):
        try:
            event = _events.validate_python(item, strict=False).to_event()
        except ValidationError as error:
            event_id, placed = _note_rejected(ingest, item)
            unplaced += not placed
            field, reason = _first_fault(error)
            answer.rejected.append(_rejection(index, event_id, field, reason))
            continue
        try:
            outcome, gap = ingest.apply(event, unplaced=unplaced)
        except MalformedEventError as error:
            answer.rejected.append(_rejection(index, event.event_id, error.field, error.reason))
            continue
        if outcome == "applied":
            answer.applied += 1
        else:
            answer.duplicates += 1
        if gap is not None:
            answer.gaps.append(_missing(gap))
    return answer


def _note_rejected(ingest: PushIngest, item: Any) -> tuple[int | None, bool]:
    """The id of a broken event, and whether it could be placed in its stream."""
    if not isinstance(item, dict):
        return None, False
    event_id, backend, rank = item.get("event_id"), item.get("backend_id"), item.get("dp_rank") or 0
    if not isinstance(event_id, int):
        return None, False
    if not isinstance(backend, str) or not isinstance(rank, int):
        return event_id, False
    return event_id, ingest.reject(Holder(backend, rank), event_id)


def _first_fault(error: ValidationError) -> tuple[str, str]:
    fault = error.errors(include_url=False, include_context=False)[0]
    kinds = {"stored", "removed", "cleared"}
    field = ".".join(str(part) for part in fault["loc"] if part not in kinds)
    if fault["type"] in ("union_tag_invalid", "union_tag_not_found"):
        field = "event_type"
    return field or "event", fault["msg"]


def _rejection(index: int, event_id: int | None, field: str, reason: str) -> RejectedEvent:
    return RejectedEvent(index=index, event_id=event_id, field=field, reason=reason[:200])


def _missing(gap: Gap) -> MissingEvents:
    return MissingEvents(
        backend_id=gap.holder.instance_id,
        dp_rank=gap.holder.rank,
        expected=gap.expected,
        received=gap.received,
    )


def _answer(answer: PushAnswer) -> JSONResponse:
    good = answer.applied + answer.duplicates
    status = 200 if not answer.rejected else 207 if good else 422
    return JSONResponse(answer.model_dump(), status_code=status)


def _unsigned(hashes: list[int]) -> tuple[int, ...]:
    return tuple(value & (1 << 64) - 1 for value in hashes)
