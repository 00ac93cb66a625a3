"""The conductor's REST API: placements and their explanations, and the cluster."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any

import numpy as np
from fastapi import APIRouter, HTTPException, Query
from pydantic import BaseModel, ConfigDict, Field

from cache_index import CacheIndex, Holder, Tier
from conductor.cluster import InstanceState
from conductor.explanation import explain, summarize
from conductor.placement import (
    NoInstanceError,
    PlacementRequest,
    TokenSource,
    UnknownModelError,
    Usage,
)
from conductor.scheduler import Scheduler


class PlacementQuery(BaseModel):
    """A request described by its token ids, for gateways that only want the decision."""

    model_config = ConfigDict(extra="forbid")

    model: str
    token_ids: Annotated[list[Annotated[int, Field(ge=0, lt=2**32)]], Field(min_length=1)]
    request_id: str = ""
    max_output_tokens: Annotated[int, Field(gt=0)] | None = None
    cache_salt: str | None = None
    tenant: str = "default"
    exclude: list[str] = []


class PlacementOutcome(BaseModel):
    """How a placement that was asked for over REST ended."""

    model_config = ConfigDict(extra="forbid")

    first_token: bool = False
    finished: bool = False
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None


def make_rest_router(scheduler: Scheduler, index: CacheIndex, clock: Callable[[], float]) -> APIRouter:
    """Routes under /v1; they read the scheduler's state in place and never block."""
    router = APIRouter(prefix="/v1", tags=["conductor"])

    @router.post("/placements", summary="Where should this request run?")
    async def place(query: PlacementQuery) -> dict[str, Any]:
        """Decide and reserve. Report progress with POST /v1/placements/{id}, else the reservation stays."""
        request = PlacementRequest(
            request_id=query.request_id,
            model=query.model,
            tokens=np.array(query.token_ids, dtype=np.uint32),
            prompt_tokens=len(query.token_ids),
            token_source=TokenSource.CLIENT,
            max_output_tokens=query.max_output_tokens,
            cache_salt=query.cache_salt,
            tenant=query.tenant,
            excluded=frozenset(query.exclude),
        )
        now_s = clock()
        try:
            placement = scheduler.place(request, now_s)
        except UnknownModelError as error:
            raise HTTPException(404, str(error)) from None
        except NoInstanceError as error:
            raise HTTPException(503, str(error)) from None
        record = scheduler.records.get(placement.placement_id)
        assert record is not None
        return {
            **explain(record, now_s),
            "prefill_url": placement.prefill.url,
            "decode_url": placement.decode.url,
        }

    @router.post("/placements/{placement_id}", summary="Report progress of a placement")
    async def report(placement_id: str, outcome: PlacementOutcome) -> dict[str, str]:
        if scheduler.records.get(placement_id) is None:
            raise HTTPException(404, _unknown_placement(placement_id))
        now_s = clock()
        if outcome.first_token:
            scheduler.prefill_finished(placement_id, now_s)
            scheduler.first_token(placement_id, now_s)
        if outcome.finished:
            usage = Usage(outcome.prompt_tokens, outcome.output_tokens, outcome.cached_tokens)
            scheduler.finished(placement_id, now_s, usage)
        return {"status": "ok"}

    @router.get("/placements", summary="The latest placements, newest first")
    async def placements(limit: Annotated[int, Query(ge=1, le=1000)] = 50) -> dict[str, Any]:
        now_s = clock()
        return {"placements": [summarize(r, now_s) for r in scheduler.records.latest(limit)]}

    @router.get("/placements/{placement_id}", summary="Why was this placement made, and how did it go?")
    async def placement(placement_id: str) -> dict[str, Any]:
        record = scheduler.records.get(placement_id)
        if record is None:
            raise HTTPException(404, _unknown_placement(placement_id))
        return explain(record, clock())

    @router.get("/instances", summary="The cluster: roles, health, load, cache")
    async def instances() -> dict[str, Any]:
        now_s = clock()
        held = index.stats().residencies_by_holder
        return {
            "instances": [
                _describe(instance, scheduler.calibration(instance.instance_class).scale, held, now_s)
                for instance in scheduler.cluster
            ]
        }

    return router


def _unknown_placement(placement_id: str) -> str:
    return f"placement {placement_id!r} is not known; only the latest are kept (scheduling.records)"


def _describe(
    instance: InstanceState, prefill_scale: float, held: Mapping[Holder, Mapping[Tier, int]], now_s: float
) -> dict[str, Any]:
    facts = instance.facts
    return {
        "id": instance.instance_id,
        "url": instance.url,
        "role": str(instance.role),
        "health": str(instance.health),
        "health_reason": instance.health_reason,
        "models": [m.name for m in facts.models] if facts else [],
        "block_size": instance.block_size,
        "kv_capacity_blocks": facts.kv_capacity_blocks if facts else None,
        "publishes_kv_events": facts.publishes_events if facts else None,
        "instance_class": instance.instance_class.name,
        "prefill_scale": round(prefill_scale, 4),
        "ranks": [
            {
                "rank": rank.target.rank,
                "placements": rank.placements,
                "pending_prefills": len(rank.prefills),
                "queue_ms": round(rank.queue_s(now_s) * 1e3, 3),
                "active_decodes": len(rank.decodes),
                "context_tokens": rank.context_tokens,
                "cached_blocks": {t.name.lower(): n for t, n in held.get(rank.holder, {}).items()},
                "reported": None
                if rank.reported is None
                else {
                    "running": rank.reported.running,
                    "waiting": rank.reported.waiting,
                    "kv_usage": round(rank.reported.kv_usage, 4),
                    "age_s": round(now_s - rank.reported.at_s, 3),
                },
            }
            for rank in instance.ranks
        ],
    }
