"""The index as a service of its own: Mooncake's indexer API (RFC #1403) over our index.

A router written for Mooncake's indexer registers its engines here and asks the same questions. What the answers
mean is told in ``cache_lookup``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import numpy as np
from fastapi import APIRouter, HTTPException, Request, Response
from pydantic import AliasChoices, BaseModel, ConfigDict, Field, model_validator

from cache_index import CacheIndex, EventSource, Holder, Namespace, PromptMatcher, StreamConfig
from cache_index.hashing import Tokens
from cache_index.mooncake import DEFAULT_RECONCILE_S, MooncakeStream
from cache_index.prompt_match import Levels
from conductor.cache_lookup import (
    DEFAULT_TENANT,
    Asked,
    BlockSize,
    LookupQuery,
    TokenQuery,
    documented,
    json_answer,
    make_lookup_router,
    parsed,
    parsed_prompt,
    tokens_by_instance,
)

_WORD = (1 << 64) - 1


class _Body(BaseModel):
    # Fields of later versions of the RFC must not turn a working client away.
    model_config = ConfigDict(extra="ignore", populate_by_name=True)


class Registration(_Body):
    """Where one rank of an engine publishes its KV events.

    ``lmcache_servers`` are the instance ids of the LMCache servers it uses, where they do not stand under the
    address of its endpoint. ``admin_endpoint`` is a Mooncake master's HTTP port, asked for its keys every
    ``reconcile_s`` seconds.
    """

    endpoint: Annotated[str, Field(pattern=r"^(tcp|http)://[^*\s]+:\d+$")]
    replay_endpoint: Annotated[str, Field(pattern=r"^tcp://[^*\s]+:\d+$")] | None = None
    type: Literal["vLLM", "SGLang", "TensorRT-LLM", "Mooncake"] = "vLLM"
    model: Annotated[
        str, Field(min_length=1, validation_alias=AliasChoices("modelname", "model", "model_name"))
    ]
    lora_name: str | None = None
    tenant_id: str | None = None
    instance_id: Annotated[str, Field(min_length=1)]
    block_size: BlockSize
    dp_rank: Annotated[int, Field(ge=0, lt=65_536)] = 0
    topic: str = ""
    lmcache_servers: list[str] = []
    admin_endpoint: Annotated[str, Field(pattern=r"^http://[^*\s/]+:\d+$")] | None = None
    reconcile_s: Annotated[float, Field(ge=1)] = DEFAULT_RECONCILE_S

    @model_validator(mode="after")
    def _scheme_of_type(self) -> Registration:
        scheme = "http" if self.type == "TensorRT-LLM" else "tcp"
        if not self.endpoint.startswith(scheme):
            raise ValueError(f"the endpoint of a {self.type} engine must be {scheme}://host:port")
        for endpoint in (self.endpoint, self.replay_endpoint, self.admin_endpoint):
            if endpoint is not None and not 0 < int(endpoint.rpartition(":")[2]) < 65_536:
                raise ValueError(f"the port of {endpoint} is not from 1 to 65535")
        if self.admin_endpoint is not None and self.type != "Mooncake":
            raise ValueError(f"admin_endpoint is for type Mooncake, not {self.type}")
        return self

    def stream(self, holder: Holder, tenant: str) -> StreamConfig:
        """What its event source is to follow."""
        config = StreamConfig(
            holder=holder,
            model=self.model,
            endpoint=self.endpoint,
            replay_endpoint=self.replay_endpoint,
            topic=self.topic,
            block_size=self.block_size,
            tenant=tenant,
        )
        if self.type != "Mooncake":
            return config
        return MooncakeStream.of(config, self.admin_endpoint, self.reconcile_s)


class Removal(_Body):
    """Which ranks of an engine to forget; all of them without ``dp_rank``."""

    instance_id: Annotated[str, Field(min_length=1)]
    tenant_id: str | None = None
    dp_rank: Annotated[int, Field(ge=0, lt=65_536)] | None = None


class HashQuery(LookupQuery):
    """The same by sequence hashes (RFC #1527, seed 1337); signed ones are taken as their unsigned form."""

    seq_hashes: Annotated[
        list[Annotated[int, Field(ge=-(2**63), lt=2**64)]],
        Field(validation_alias=AliasChoices("seq_hashes", "block_hashes")),
    ]


@dataclass(frozen=True, slots=True)
class RegisteredRank:
    """One stream that is followed."""

    holder: Holder
    row: int  # of the holder in match results
    instance_id: str
    rank: int
    tenant: str
    model: str
    block_size: int
    kind: str


class IndexerService:
    """Registered ranks, and matches over them. ``sources`` by the type that an engine registers with.

    ``keep`` is given all registrations whenever they have changed.
    """

    def __init__(
        self,
        index: CacheIndex,
        sources: Mapping[str, EventSource],
        prompts: PromptMatcher | None = None,
        *,
        keep: Callable[[Iterable[Registration]], None] = lambda registrations: None,
    ) -> None:
        self.index = index
        self._sources = sources
        self.prompts = prompts or PromptMatcher(index)
        self._keep = keep
        self._ranks: dict[Holder, RegisteredRank] = {}
        self._groups: dict[
            tuple[str, str], dict[int, list[RegisteredRank]]
        ] = {}  # by model, tenant; block size
        self._rows: frozenset[int] = frozenset()
        self._registrations: dict[Holder, Registration] = {}

    def register(self, registration: Registration) -> None:
        """Follow a rank's stream; registering it again replaces the stream."""
        tenant = registration.tenant_id or DEFAULT_TENANT
        holder = _holder(tenant, registration.instance_id, registration.dp_rank)
        former = self._ranks.get(holder)
        source = self._sources[registration.type]
        if former is not None and self._sources[former.kind] is not source:
            self._sources[former.kind].remove_stream(holder)
        source.add_stream(registration.stream(holder, tenant))
        self._ranks[holder] = RegisteredRank(
            holder=holder,
            row=self.index.register(holder),
            instance_id=registration.instance_id,
            rank=registration.dp_rank,
            tenant=tenant,
            model=registration.model,
            block_size=registration.block_size,
            kind=registration.type,
        )
        if registration.type != "Mooncake":
            host = urlsplit(registration.endpoint).hostname or ""
            self.prompts.attach(holder, host, servers=frozenset(registration.lmcache_servers))
        self._registrations[holder] = registration
        self._changed()

    def unregister(self, removal: Removal) -> list[RegisteredRank]:
        """Forget ranks and what they held; the ranks that were known."""
        tenant = removal.tenant_id or DEFAULT_TENANT
        removed = [
            known
            for known in self._ranks.values()
            if known.instance_id == removal.instance_id
            and known.tenant == tenant
            and removal.dp_rank in (None, known.rank)
        ]
        for known in removed:
            del self._ranks[known.holder], self._registrations[known.holder]
            self._sources[known.kind].remove_stream(known.holder)
            self.prompts.detach(known.holder)
            self.index.unregister(known.holder)
        if removed:
            self._changed()
        return removed

    def _changed(self) -> None:
        self._groups = {}
        for known in self._ranks.values():
            by_size = self._groups.setdefault((known.model, known.tenant), {})
            by_size.setdefault(known.block_size, []).append(known)
        self._rows = frozenset(known.row for known in self._ranks.values())
        self._keep(self._registrations.values())

    def ranks(self) -> list[RegisteredRank]:
        return list(self._ranks.values())

    def asked(self, query: LookupQuery) -> Iterator[Asked]:
        groups = self._groups.get((query.model, query.tenant), {})
        for block_size in groups if query.block_size is None else (query.block_size,):
            namespace = Namespace(query.model, block_size, query.lora_name, query.tenant)
            yield Asked(namespace, groups.get(block_size, ()))

    def rows(self) -> frozenset[int]:
        """Of the registered ranks in match results."""
        return self._rows

    def query_tokens(self, query: LookupQuery, tokens: Tokens) -> dict[str, Any]:
        """Matches by instance."""

        def levels(namespace: Namespace) -> Levels:
            return self.prompts.match(namespace, tokens, cache_salt=query.cache_salt)

        return self._answer(query, levels)

    def query_hashes(self, query: HashQuery) -> dict[str, Any]:
        """Matches by instance; what LMCache holds cannot be asked for by these hashes."""
        hashes = np.array([value & _WORD for value in query.seq_hashes], dtype=np.uint64)
        return self._answer(query, lambda namespace: self.index.match(namespace, hashes))

    def _answer(self, query: LookupQuery, levels: Callable[[Namespace], Levels]) -> dict[str, Any]:
        found = tokens_by_instance(
            self.index, self.asked(query), levels, engines=self._rows, instance_id=query.instance_id
        )
        return {query.tenant: found}


def _holder(tenant: str, instance_id: str, rank: int) -> Holder:
    return Holder(instance_id if tenant == DEFAULT_TENANT else f"{tenant}|{instance_id}", rank)


def make_indexer_router(service: IndexerService) -> APIRouter:
    """The RFC's four routes, and what is registered."""
    router = APIRouter(tags=["indexer"])

    @router.post("/register", summary="Follow an engine's KV events", **documented(Registration))
    async def register(request: Request) -> dict[str, str]:
        registration = await parsed(request, Registration)
        service.register(registration)
        return {"status": "registered successfully", "instance_id": registration.instance_id}

    @router.post("/unregister", summary="Forget an engine, or one rank of it", **documented(Removal))
    async def unregister(request: Request) -> dict[str, Any]:
        removal = await parsed(request, Removal)
        removed = service.unregister(removal)
        if not removed:
            raise HTTPException(
                404,
                f"instance {removal.instance_id!r} is not registered; GET /instances lists those that are",
            )
        names = [f"{known.instance_id}|{known.tenant}|{known.rank}" for known in removed]
        return {"status": "unregistered successfully", "removed_instances": names}

    @router.post("/query", summary="Longest cached prefix of a prompt, by instance", **documented(TokenQuery))
    async def query(request: Request) -> Response:
        """The registered instances, and those that push their events here. What the LMCache servers of an
        instance hold counts for it."""
        return json_answer(service.query_tokens(*await parsed_prompt(request)))

    @router.post("/query_by_hash", summary="The same, by sequence hashes", **documented(HashQuery))
    async def query_by_hash(request: Request) -> Response:
        return json_answer(service.query_hashes(await parsed(request, HashQuery)))

    @router.get("/instances", summary="What is registered")
    async def instances() -> dict[str, Any]:
        return {
            "instances": [
                {
                    "instance_id": known.instance_id,
                    "dp_rank": known.rank,
                    "tenant_id": known.tenant,
                    "modelname": known.model,
                    "block_size": known.block_size,
                    "type": known.kind,
                }
                for known in service.ranks()
            ]
        }

    router.include_router(make_lookup_router(service.index, service.prompts, service))
    return router
