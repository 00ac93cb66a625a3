"""Routes that change what is cached where: orders of the caller, and the actions that come of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import APIRouter, HTTPException, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field, model_validator

from cache_index import Tier
from conductor.action_ledger import ActionRecord, ActionState
from conductor.actions import ActionKind, Place
from conductor.cache_orders import (
    CacheOrder,
    CacheOrders,
    NotLeadingError,
    OrderError,
    UnservedModelError,
    parse_place,
)
from conductor.cluster import Cluster
from conductor.rest import answers
from conductor.rest.bodies import documented_body, invalid, parsed
from conductor.rest.prompts import Tokenize, TokenizedPrompt

TierName = Literal["device", "host", "disk", "pod", "remote"]


class PlaceBody(BaseModel):
    """A tier of an instance, of an LMCache server (`lmcache:ID`), or of a store that several share."""

    model_config = ConfigDict(extra="forbid")

    instance: Annotated[str, Field(min_length=1)]
    tier: TierName = "host"
    rank: Annotated[int, Field(ge=0)] = 0

    def place(self, cluster: Cluster) -> Place:
        return parse_place(self.instance, Tier[self.tier.upper()], self.rank, cluster)


class TargetOrder(BaseModel):
    """What to do where. The prompt comes in one form: `text`, `messages` or `token_ids`."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "examples": [
                {
                    "model": "emulated-8b",
                    "text": "You are a helpful assistant.",
                    "target": {"instance": "prefill-0", "tier": "host"},
                }
            ]
        },
    )

    model: Annotated[str, Field(min_length=1, description="A model, LoRA adapter or alias of /v1/models.")]
    target: PlaceBody
    text: Annotated[str | None, Field(min_length=1, description="The prompt, tokenized here.")] = None
    messages: Annotated[
        list[dict[str, Any]] | None, Field(min_length=1, description="A chat; templated, tokenized here.")
    ] = None
    tools: Annotated[list[dict[str, Any]] | None, Field(description="Of the chat template.")] = None
    token_ids: Annotated[
        list[Annotated[int, Field(ge=0, lt=2**32)]] | None,
        Field(min_length=1, description="The prompt as the engine's tokenizer would make it."),
    ] = None
    cache_salt: Annotated[str | None, Field(description="Keeps this prompt's cache apart.")] = None
    cache_tenant: Annotated[
        str, Field(min_length=1, description="The part of engines' caches, where they keep tenants apart.")
    ] = "default"
    start_block: Annotated[int, Field(ge=0, description="The first block that is meant.")] = 0
    stop_block: Annotated[
        int | None, Field(gt=0, description="The first that is not; all of the prompt without it.")
    ] = None
    deadline_s: Annotated[
        float, Field(gt=0, le=86_400, description="Of no use when it takes longer, and given up then.")
    ] = 60.0
    reason: Annotated[str, Field(max_length=200, description="Shown with the action.")] = "ordered over REST"

    @model_validator(mode="after")
    def _one_prompt(self) -> TargetOrder:
        given = self.prompt_forms
        if len(given) > 1 or (not given and not self.prompt_optional):
            found = " and ".join(given) or "none"
            raise ValueError(f"give the prompt in one form: text, messages or token_ids (given: {found})")
        if self.tools is not None and self.messages is None:
            raise ValueError("tools belong to messages; leave them out")
        if not given and (self.start_block or self.stop_block is not None):
            raise ValueError("start_block and stop_block are of a prompt; leave them out, or give one")
        return self

    @property
    def prompt_forms(self) -> list[str]:
        """What it comes as: one, or for `clear` none."""
        return [name for name in ("text", "messages", "token_ids") if getattr(self, name) is not None]

    @property
    def prompt_optional(self) -> bool:
        return False


class ClearOrder(TargetOrder):
    """Drop a prompt's blocks from a tier; without a prompt, everything there."""

    @property
    def prompt_optional(self) -> bool:
        return True


class PrefetchOrder(TargetOrder):
    """Bring a prompt's blocks to a tier, from `source` or from whoever has most of them."""

    source: PlaceBody | None = None


class MoveOrder(TargetOrder):
    """Bring a prompt's blocks from one place to another; the source drops them unless `copy` is true."""

    source: PlaceBody
    copy_: Annotated[bool, Field(alias="copy", description="The source keeps its own.")] = False


def make_cache_order_routes(orders: CacheOrders, cluster: Cluster, tokenize: Tokenize | None) -> APIRouter:
    """`/cache/{pin,unpin,move,prefetch,compress,decompress,clear}`."""
    router = APIRouter(prefix="/cache", tags=["cache"])

    async def taken(kind: ActionKind, order: TargetOrder) -> Response:
        source = getattr(order, "source", None)
        try:
            orders.check_served(order.model)  # of another model no tokenizer could tell why it fails
            record = orders.submit(
                CacheOrder(
                    kind=kind,
                    model=order.model,
                    target=order.target.place(cluster),
                    source=None if source is None else source.place(cluster),
                    tokens=await _tokens(order, tokenize),
                    cache_salt=order.cache_salt,
                    tenant=order.cache_tenant,
                    start=order.start_block,
                    stop=order.stop_block,
                    deadline_s=order.deadline_s,
                    reason=order.reason,
                )
            )
        except OrderError as error:
            field = error.field if error.field != "prompt" else order.prompt_forms[0]
            raise invalid(field, str(error)) from None
        except UnservedModelError as error:
            raise HTTPException(404, f"model: {error}") from None
        except NotLeadingError as error:
            raise HTTPException(409, str(error)) from None
        return answers.json_answer({"actions": [describe(record, record.submitted_s)]}, 202)

    def verb(name: str, kind: ActionKind, body: type[TargetOrder], summary: str) -> None:
        async def route(request: Request) -> Response:
            order = parsed(body, await request.body())
            copies = isinstance(order, MoveOrder) and order.copy_
            return await taken(ActionKind.REPLICATE if copies else kind, order)

        router.post(
            f"/{name}",
            name=name,
            summary=summary,
            description="Answers at once with the actions, which run in the background: `GET /v1/actions/{id}`. "
            "422 says why when nobody can do that there, 409 which replica leads where this one does not.",
            **answers.documented(answers.ActionsTaken, 404, 409, 422, status=202, text="It has been taken."),
            openapi_extra=documented_body(body),
        )(route)

    verb("pin", ActionKind.PIN, TargetOrder, "Keep a prompt's blocks in a tier")
    verb("unpin", ActionKind.UNPIN, TargetOrder, "Let a prompt's blocks be evicted again")
    verb("move", ActionKind.MOVE, MoveOrder, "Move or copy a prompt's blocks to another place")
    verb("prefetch", ActionKind.PREFETCH, PrefetchOrder, "Bring a prompt's blocks to a faster tier")
    verb("compress", ActionKind.COMPRESS, TargetOrder, "Compress a prompt's blocks where they are")
    verb("decompress", ActionKind.DECOMPRESS, TargetOrder, "Decompress a prompt's blocks where they are")
    verb("clear", ActionKind.EVICT, ClearOrder, "Drop a prompt's blocks from a tier, or everything there")
    return router


def make_action_routes(orders: CacheOrders, clock: Callable[[], float]) -> APIRouter:
    """`/actions` and below: what was ordered, and what the planner does."""
    router = APIRouter(prefix="/actions", tags=["actions"])
    ledger = orders.runner.ledger

    def known(action_id: str) -> ActionRecord:
        record = ledger.find(action_id)
        if record is None:
            raise HTTPException(404, f"action {action_id!r} is not known; only the latest are kept")
        return record

    @router.get("", summary="Tier actions, under way first", **answers.documented(answers.Actions, 422))
    async def actions(
        state: Annotated[ActionState | None, Query(description="Only those in this state.")] = None,
        limit: Annotated[int, Query(ge=1, le=10_000, description="How many at most.")] = 100,
    ) -> Response:
        """Running ones, then planned, then ended ones, each newest first. `counts` are of all."""
        now_s = clock()
        return answers.json_answer(
            {
                "counts": {str(name): count for name, count in ledger.counts().items()},
                "actions": [describe(record, now_s) for record in ledger.records(state, limit)],
            }
        )

    @router.get("/{action_id}", summary="One tier action", **answers.documented(answers.ActionStatus, 404))
    async def action(action_id: str) -> Response:
        """What it is to do and why, and what became of it."""
        return answers.json_answer(describe(known(action_id), clock()))

    @router.post(
        "/{action_id}/cancel",
        summary="Cancel a tier action",
        **answers.documented(answers.ActionStatus, 404, 409),
    )
    async def cancel(action_id: str) -> Response:
        """What a store has begun it may finish all the same."""
        record = known(action_id)
        if record.state.ended:
            raise HTTPException(409, f"action {action_id!r} has ended already: {record.state}")
        now_s = clock()
        ledger.cancel(action_id, now_s)
        return answers.json_answer(describe(record, now_s))

    return router


def describe(record: ActionRecord, now_s: float) -> dict[str, Any]:
    action = record.action
    ran_s = None
    if record.started_s is not None:
        ran_s = (now_s if record.ended_s is None else record.ended_s) - record.started_s
    return {
        "id": action.action_id,
        "kind": str(action.kind),
        "state": str(record.state),
        "partial": record.partial,
        "detail": record.detail,
        "reason": action.reason,
        "ordered": record.ordered,
        "model": None
        if action.prefix is None
        else action.prefix.namespace.lora or action.prefix.namespace.model,
        "source": None if action.source is None else _place(action.source),
        "target": _place(action.target),
        "start_block": action.start,
        "stop_block": action.stop,
        "blocks_done": record.blocks_done,
        "kv_bytes": action.kv_bytes,
        "executor": record.executor,
        "attempts": record.attempts,
        "benefit_s": action.benefit_s,
        "cost_s": action.cost_s,
        "age_s": round(now_s - record.submitted_s, 3),
        "ran_s": None if ran_s is None else round(ran_s, 3),
        "deadline_in_s": round(action.deadline_s - now_s, 3),
    }


def _place(place: Place) -> dict[str, Any]:
    return {
        "instance": place.holder.instance_id,
        "rank": place.holder.rank,
        "tier": place.tier.name.lower(),
    }


async def _tokens(order: TargetOrder, tokenize: Tokenize | None) -> Any:
    if order.token_ids is not None:
        return np.array(order.token_ids, np.uint32)
    if order.text is None and order.messages is None:
        return None
    document: dict[str, Any] = {"model": order.model}
    if order.text is not None:
        document["prompt"] = order.text
    else:
        document["messages"] = order.messages
        if order.tools is not None:
            document["tools"] = order.tools
    tokenized: TokenizedPrompt | None = await tokenize(document) if tokenize is not None else None
    if tokenized is None:
        form = "text" if order.text is not None else "messages"
        raise invalid(
            form,
            f"there is no tokenizer for {order.model!r} here, or it failed (its log says why); give token_ids",
        )
    return tokenized.tokens
