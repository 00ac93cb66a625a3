"""Routes of instances: who they are, and how they join and leave while the cluster runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Protocol

from fastapi import APIRouter, HTTPException, Query, Request, Response
from pydantic import ConfigDict

from cache_index import Holder, Tier
from conductor.cluster import InstanceState
from conductor.discovery.registrations import NotRegisteredError, Registrations, TakenError
from conductor.instance_config import InstanceConfig
from conductor.membership import UnknownInstanceError
from conductor.rest import answers
from conductor.rest.bodies import documented_body, invalid, parsed
from conductor.scheduler import Scheduler

_Held = Mapping[Holder, Mapping[Tier, int]]


class InstanceOrders(Protocol):
    """Who carries out what is asked here (`Membership`, or `SharedMembers` over it)."""

    def put(self, config: InstanceConfig) -> bool: ...

    def remove(self, instance_id: str) -> None: ...

    def drain(self, instance_id: str, within_s: float) -> int: ...

    def usable(self, config: InstanceConfig) -> InstanceState: ...

    def source_of(self, instance_id: str) -> str | None: ...


class InstanceBody(InstanceConfig):
    """An instance as an entry of `instances:` in the configuration; its `id` is the one of the path."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"url": "http://10.0.0.7:8000", "role": "prefill", "instance_class": "llama-3.1-8b-h100"}
            ]
        }
    )

    id: str = ""


def make_instance_routes(
    scheduler: Scheduler,
    clock: Callable[[], float],
    membership: InstanceOrders,
    registrations: Registrations,
) -> APIRouter:
    """`/instances` and below."""
    router = APIRouter(prefix="/instances", tags=["instances"])

    def known(instance_id: str) -> InstanceState:
        instance = scheduler.cluster.get(instance_id)
        if instance is None:
            raise HTTPException(404, f"instance {instance_id!r} is not in the cluster; GET /v1/instances")
        return instance

    def description(instance: InstanceState, held: _Held) -> dict[str, Any]:
        scale = scheduler.calibration(instance.instance_class).prefill.factor
        source = membership.source_of(instance.instance_id)
        expires_in_s = registrations.expires_in_s(instance.instance_id)
        return _describe(instance, scale, held, clock()) | {
            "source": source,
            "registration_expires_in_s": None if expires_in_s is None else round(expires_in_s, 3),
        }

    @router.get("", summary="All instances", **answers.documented(answers.Instances))
    async def instances() -> Response:
        """Role, health and its reason, what was placed on each rank, what its engine reports, what it caches."""
        held = scheduler.index.stats().residencies_by_holder
        return answers.json_answer({"instances": [description(each, held) for each in scheduler.cluster]})

    @router.get("/{instance_id}", summary="One instance", **answers.documented(answers.Instance, 404))
    async def instance(instance_id: str) -> Response:
        """As in the list of all."""
        held = scheduler.index.stats().residencies_by_holder
        return answers.json_answer(description(known(instance_id), held))

    @router.put(
        "/{instance_id}",
        summary="Add or replace an instance",
        **{
            **answers.documented(answers.Instance, 409, 422, text="It was there already, as described."),
            "responses": {
                **answers.documented(answers.Instance, 409, 422)["responses"],
                201: {"model": answers.Instance, "description": "It was added, or replaced another."},
            },
        },
        openapi_extra=documented_body(InstanceBody),
    )
    async def put(
        instance_id: str,
        request: Request,
        ttl_s: Annotated[
            float | None,
            Query(
                gt=0,
                le=3_600,
                description="Register it for so long: it stays as long as it is put again, or sends heartbeats.",
            ),
        ] = None,
    ) -> Response:
        """It is a candidate once it has answered its probe. The same description again changes nothing; another
        one replaces the instance: what is placed there runs to its end, and what it cached is forgotten. Without
        shared state it is not kept over a restart: the configuration file is what a conductor starts with. With
        `ttl_s` it is registered: silent for that long, it gets no more requests; silent for longer, it leaves."""
        body = parsed(InstanceBody, await request.body())
        if body.id not in ("", instance_id):
            raise invalid("id", f"is {body.id!r} here and {instance_id!r} in the path; leave it out")
        config = InstanceConfig(**{**body.model_dump(), "id": instance_id})
        try:
            membership.usable(config)
        except ValueError as error:
            raise invalid("url" if "url" in str(error) else "location", str(error)) from None
        if ttl_s is None:
            changed = membership.put(config)
            registrations.forget(instance_id)
        else:
            try:
                changed = registrations.register(config, ttl_s)
            except TakenError as error:
                raise HTTPException(409, str(error)) from None
        held = scheduler.index.stats().residencies_by_holder
        return answers.json_answer(description(known(instance_id), held), 201 if changed else 200)

    @router.post(
        "/{instance_id}/heartbeat",
        summary="A registered instance is alive",
        **answers.documented(answers.Heartbeat, 404),
    )
    async def heartbeat(instance_id: str) -> Response:
        """Its time to live begins anew. 404: it has to be registered again (`PUT` with `ttl_s`)."""
        try:
            expires_in_s = registrations.heartbeat(instance_id)
        except NotRegisteredError as error:
            raise HTTPException(404, str(error)) from None
        return answers.json_answer({"id": instance_id, "expires_in_s": expires_in_s})

    @router.delete(
        "/{instance_id}",
        summary="Take an instance out",
        **answers.documented(answers.InstanceRemoval, 404, 409, 422),
    )
    async def delete(
        instance_id: str,
        drain: Annotated[
            bool, Query(description="Place nothing more there, and remove it when its placements have ended.")
        ] = False,
        deadline_s: Annotated[
            float, Query(gt=0, description="With `drain`: remove it after this long in any case.")
        ] = 600.0,
        registered: Annotated[
            bool, Query(description="Only if it has a registration; 409 for an instance of another source.")
        ] = False,
    ) -> Response:
        """Without `drain` it is gone at once. Requests that run there are not cut off in either case."""
        if registered and registrations.expires_in_s(instance_id) is None:
            source = membership.source_of(known(instance_id).instance_id)
            raise HTTPException(
                409, f"instance {instance_id!r} is not registered; it is of the source {source}"
            )
        registrations.forget(instance_id)
        try:
            if drain:
                left = membership.drain(instance_id, deadline_s)
                status = "draining"
            else:
                left = len({each for rank in known(instance_id).ranks for each in rank.under_way()})
                membership.remove(instance_id)
                status = "removed"
        except UnknownInstanceError as error:
            raise HTTPException(404, str(error)) from None
        return answers.json_answer({"id": instance_id, "status": status, "placements_under_way": left})

    return router


def _describe(instance: InstanceState, prefill_scale: float, held: _Held, now_s: float) -> dict[str, Any]:
    facts = instance.facts
    return {
        "id": instance.instance_id,
        "url": instance.url,
        "role": str(instance.role),
        "health": str(instance.health),
        "health_reason": instance.health_reason,
        "draining": instance.draining,
        "models": [m.name for m in facts.models] if facts else [],
        "block_size": instance.block_size,
        "kv_capacity_blocks": facts.kv_capacity_blocks if facts else None,
        "publishes_kv_events": facts.publishes_events if facts else None,
        "instance_class": instance.instance_class.name,
        "protocol": instance.protocol,
        "location": instance.location,
        "prefill_scale": round(prefill_scale, 4),
        "ranks": [
            {
                "rank": rank.target.rank,
                "placements": rank.placements,
                "pending_prefills": rank.pending_prefills,
                "queue_ms": round(rank.queue_s(now_s) * 1e3, 3),
                "active_decodes": rank.active_decodes,
                "context_tokens": rank.context_tokens,
                "cached_blocks": {t.name.lower(): n for t, n in held.get(rank.holder, {}).items()},
                "reported": None
                if rank.reported is None
                else {
                    "running": rank.reported.running,
                    "waiting": rank.reported.waiting,
                    "kv_usage": round(rank.reported.kv_usage, 4),
                    "preemptions": rank.reported.preemptions,
                    "age_s": round(now_s - rank.reported.at_s, 3),
                },
            }
            for rank in instance.ranks
        ],
    }
