"""The HTTP side of an LMCache coordinator, so that LMCache servers report to us what they hold.

Paths and bodies as served by LMCache 0.5.6's own coordinator, of which this is the part that servers call:
registration, heartbeats and cache events. Point the servers' coordinator URL at where this is mounted.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Annotated, Any, Literal

from fastapi import APIRouter, HTTPException, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from cache_index.lmcache_directory import LMCacheDirectory
from cache_index.lmcache_keys import index_key
from cache_index.lmcache_objects import ChunkObject, LMCacheServer, ObjectBatch

Port = Annotated[int, Field(ge=1, le=65535)]
Trimmed = Annotated[str, StringConstraints(strip_whitespace=True)]


class _Body(BaseModel):
    # Later versions of LMCache may send more; that must not turn them away.
    model_config = ConfigDict(extra="ignore")


class RegisterRequest(_Body):
    """Who and where a server is. Without ``instance_id`` it is given one."""

    instance_id: Trimmed = ""
    ip: Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)]
    http_port: Port
    metadata: dict[str, str] = {}
    p2p_advertised_url: Trimmed = ""
    mq_port: Annotated[int, Field(ge=0, le=65535)] = 0


class RegisterResponse(BaseModel):
    instance_id: str
    re_registered: bool


class ObjectKey(_Body):
    """One shard of one chunk."""

    chunk_hash_hex: Annotated[str, Field(pattern=r"^([0-9a-fA-F]{2}){8,64}$")]
    model_name: str
    kv_rank: Annotated[int, Field(ge=0, lt=2**32)]
    object_group_id: Annotated[int, Field(ge=0)] = 0
    cache_salt: str = ""


class CacheEventEntry(_Body):
    """``token_ids`` are the chunk's, where the server still knows them; ``token_offset`` -1 is unknown."""

    key: ObjectKey
    token_ids: list[Annotated[int, Field(ge=0, lt=2**32)]] = []
    token_offset: int = -1


class CacheEventBatch(_Body):
    """What happened to some objects in one backend of a server."""

    instance_id: Annotated[str, Field(min_length=1)]
    incarnation: Annotated[int, Field(ge=0)]
    seq: Annotated[int, Field(ge=1)]
    event_type: Literal["store", "delete", "access", "config"]
    tier: Literal["l1", "l2"]
    backend: str
    entries: list[CacheEventEntry] = []
    shared: bool = False

    def to_batch(self) -> ObjectBatch:
        return ObjectBatch(
            instance_id=self.instance_id,
            incarnation=self.incarnation,
            sequence=self.seq,
            kind=self.event_type,
            tier=self.tier,
            backend=self.backend,
            shared=self.shared,
            objects=tuple(
                ChunkObject(
                    key=index_key(bytes.fromhex(entry.key.chunk_hash_hex)),
                    model=entry.key.model_name,
                    kv_rank=entry.key.kv_rank,
                    group=entry.key.object_group_id,
                    salt=entry.key.cache_salt,
                    first_tokens=() if entry.token_offset else tuple(entry.token_ids),
                )
                for entry in self.entries
            ),
        )


class CacheEventsRequest(_Body):
    """Batches of any servers, in order for each."""

    batches: list[CacheEventBatch] = []


class CacheEventsResponse(BaseModel):
    """How many batches were applied, were known, or came from a former life of their server."""

    applied: int = 0
    duplicates: int = 0
    stale: int = 0


def make_lmcache_router(directory: LMCacheDirectory, clock: Callable[[], float]) -> APIRouter:
    """Routes without a prefix of their own; mount them under one.

    They run in worker threads: a batch of thousands of objects must not hold up requests.
    """
    router = APIRouter(tags=["LMCache coordinator"])

    @router.get("/healthz", summary="Whether the coordinator is alive")
    def healthz() -> dict[str, str]:
        return {"status": "healthy"}

    @router.post("/instances", summary="Register a server, or register it again")
    def register(body: RegisterRequest) -> RegisterResponse:
        now_s = clock()
        server = LMCacheServer(
            instance_id=body.instance_id or f"mp-{uuid.uuid4().hex}",
            ip=body.ip,
            http_port=body.http_port,
            registered_at_s=now_s,
            metadata=body.metadata,
            p2p_advertised_url=body.p2p_advertised_url,
            mq_port=body.mq_port,
        )
        try:
            known = directory.register(server, now_s)
        except ValueError as error:
            raise HTTPException(503, str(error)) from None
        return RegisterResponse(instance_id=server.instance_id, re_registered=known)

    @router.get("/instances", summary="The registered servers")
    def instances() -> dict[str, Any]:
        return {"instances": [_describe(server) for server in directory.servers()]}

    @router.put("/instances/{instance_id}/heartbeat", summary="A server is alive", response_model=None)
    def heartbeat(instance_id: str) -> dict[str, str] | JSONResponse:
        """404 asks an unknown server to register again."""
        if directory.heartbeat(instance_id, clock()):
            return {"instance_id": instance_id}
        return JSONResponse({"error": f"unknown instance {instance_id}; re-register"}, status_code=404)

    @router.delete("/instances/{instance_id}", summary="A server leaves", status_code=204)
    def deregister(instance_id: str) -> Response:
        directory.deregister(instance_id, clock())
        return Response(status_code=204)

    @router.post("/events", summary="Report what happened to cached objects")
    def events(body: CacheEventsRequest) -> CacheEventsResponse:
        response, now_s = CacheEventsResponse(), clock()
        for batch in body.batches:
            try:
                outcome = directory.apply(batch.to_batch(), now_s)
            except ValueError as error:
                raise HTTPException(503, str(error)) from None
            if outcome == "applied":
                response.applied += 1
            elif outcome == "duplicate":
                response.duplicates += 1
            else:
                response.stale += 1
        return response

    return router


def _describe(server: LMCacheServer) -> dict[str, Any]:
    return {
        "instance_id": server.instance_id,
        "ip": server.ip,
        "http_port": server.http_port,
        "registration_time": server.registered_at_s,
        "metadata": server.metadata,
        "p2p_advertised_url": server.p2p_advertised_url,
        "mq_port": server.mq_port,
    }
