"""The index as a service of its own: Mooncake's indexer API (RFC #1403) over our index.

A router written for Mooncake's indexer registers its engines here and asks the same questions. Counts are
tokens. ``GPU``, ``CPU`` and ``DISK`` are cumulative: the longest prefix reachable within the device, within
device and host, and within all tiers; ``longest_matched`` is the last of them; ``DP`` has it for every
data-parallel rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
import orjson
from fastapi import APIRouter, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from numpy.typing import NDArray
from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError, model_validator

from cache_index import CacheIndex, EventSource, Holder, Namespace, StreamConfig, Tier, sequence_hashes
from cache_index.hashing import Hashes

_DEFAULT_TENANT = "default"
_WORD = (1 << 64) - 1

TokenId = Annotated[int, Field(ge=0, lt=2**32)]
BlockSize = Annotated[int, Field(gt=0, le=65_536)]


class _Body(BaseModel):
    # Fields of later versions of the RFC must not turn a working client away.
    model_config = ConfigDict(extra="ignore", populate_by_name=True)


class Registration(_Body):
    """Where one rank of an engine publishes its KV events."""

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
    dp_rank: Annotated[int, Field(ge=0)] = 0
    topic: str = ""

    @model_validator(mode="after")
    def _scheme_of_type(self) -> Registration:
        scheme = "http" if self.type == "TensorRT-LLM" else "tcp"
        if not self.endpoint.startswith(scheme):
            raise ValueError(f"the endpoint of a {self.type} engine must be {scheme}://host:port")
        return self


class Removal(_Body):
    """Which ranks of an engine to forget; all of them without ``dp_rank``."""

    instance_id: Annotated[str, Field(min_length=1)]
    tenant_id: str | None = None
    dp_rank: Annotated[int, Field(ge=0)] | None = None


class _Context(_Body):
    model: Annotated[
        str, Field(min_length=1, validation_alias=AliasChoices("model", "modelname", "model_name"))
    ]
    lora_name: str | None = None
    tenant_id: str | None = None
    instance_id: str | None = None
    block_size: BlockSize | None = None
    cache_salt: str | None = None


class TokenQuery(_Context):
    """Who has the longest prefix of this prompt?"""

    token_ids: list[TokenId]


class HashQuery(_Context):
    """The same by sequence hashes (RFC #1527, seed 1337); signed ones are taken as their unsigned form."""

    seq_hashes: Annotated[
        list[Annotated[int, Field(ge=-(2**63), lt=2**64)]],
        Field(validation_alias=AliasChoices("seq_hashes", "block_hashes")),
    ]


Query = TypeVar("Query", bound=_Context)


@dataclass(frozen=True, slots=True)
class RegisteredRank:
    """One stream that is followed."""

    holder: Holder
    instance_id: str
    rank: int
    tenant: str
    model: str
    block_size: int
    kind: str


class IndexerService:
    """Registered ranks, and matches over them. ``sources`` by the type that an engine registers with."""

    def __init__(self, index: CacheIndex, sources: Mapping[str, EventSource]) -> None:
        self._index = index
        self._sources = sources
        self._ranks: dict[Holder, RegisteredRank] = {}

    def register(self, registration: Registration) -> None:
        """Follow a rank's stream; registering it again replaces the stream."""
        tenant = registration.tenant_id or _DEFAULT_TENANT
        holder = _holder(tenant, registration.instance_id, registration.dp_rank)
        self._ranks[holder] = RegisteredRank(
            holder=holder,
            instance_id=registration.instance_id,
            rank=registration.dp_rank,
            tenant=tenant,
            model=registration.model,
            block_size=registration.block_size,
            kind=registration.type,
        )
        self._sources[registration.type].add_stream(
            StreamConfig(
                holder=holder,
                model=registration.model,
                endpoint=registration.endpoint,
                replay_endpoint=registration.replay_endpoint,
                topic=registration.topic,
                block_size=registration.block_size,
                tenant=tenant,
            )
        )

    def unregister(self, removal: Removal) -> list[RegisteredRank]:
        """Forget ranks and what they held; the ranks that were known."""
        tenant = removal.tenant_id or _DEFAULT_TENANT
        removed = [
            known
            for known in self._ranks.values()
            if known.instance_id == removal.instance_id
            and known.tenant == tenant
            and removal.dp_rank in (None, known.rank)
        ]
        for known in removed:
            del self._ranks[known.holder]
            self._sources[known.kind].remove_stream(known.holder)
            self._index.unregister(known.holder)
        return removed

    def ranks(self) -> list[RegisteredRank]:
        return list(self._ranks.values())

    def query_tokens(self, query: TokenQuery) -> dict[str, Any]:
        tokens = np.array(query.token_ids, dtype=np.uint32)
        return self._query(query, lambda size: sequence_hashes(tokens, size, cache_salt=query.cache_salt))

    def query_hashes(self, query: HashQuery) -> dict[str, Any]:
        hashes = np.array([value & _WORD for value in query.seq_hashes], dtype=np.uint64)
        return self._query(query, lambda size: hashes)

    def _query(self, query: _Context, hashes_for: Callable[[int], Hashes]) -> dict[str, Any]:
        tenant = query.tenant_id or _DEFAULT_TENANT
        by_size: dict[int, list[RegisteredRank]] = {}
        for known in self._ranks.values():
            if (
                known.model == query.model
                and known.tenant == tenant
                and query.block_size in (None, known.block_size)
                and query.instance_id in (None, known.instance_id)
            ):
                by_size.setdefault(known.block_size, []).append(known)
        answer: dict[str, dict[str, Any]] = {}
        for block_size, members in by_size.items():
            namespace = Namespace(query.model, block_size, query.lora_name, tenant)
            matched = self._index.match(namespace, hashes_for(block_size))
            for known in members:
                self._add(answer, known, matched)
        return {tenant: answer}

    def _add(
        self, answer: dict[str, dict[str, Any]], known: RegisteredRank, matched: NDArray[np.int32]
    ) -> None:
        row = self._index.holder_id(known.holder)
        if row is None:
            return
        levels = (matched[row] * known.block_size).tolist()
        device, host, all_tiers = levels[Tier.DEVICE], levels[Tier.HOST], levels[-1]
        entry = answer.setdefault(
            known.instance_id, {"longest_matched": 0, "GPU": 0, "CPU": 0, "DISK": 0, "DP": {}}
        )
        for name, value in (
            ("longest_matched", all_tiers),
            ("GPU", device),
            ("CPU", host),
            ("DISK", all_tiers),
        ):
            entry[name] = max(entry[name], value)
        entry["DP"][str(known.rank)] = all_tiers


def _holder(tenant: str, instance_id: str, rank: int) -> Holder:
    return Holder(instance_id if tenant == _DEFAULT_TENANT else f"{tenant}|{instance_id}", rank)


async def _parsed(request: Request, kind: type[Query]) -> Query:
    """The body, parsed and checked in one pass: prompts are long, and parsing them is most of a query's time."""
    try:
        return kind.model_validate_json(await request.body())
    except ValidationError as error:
        raise RequestValidationError(error.errors(include_url=False, include_context=False)) from None


def _documented(kind: type[_Context]) -> dict[str, Any]:
    """What FastAPI would have found in the signature."""
    schema = kind.model_json_schema(by_alias=False)
    return {
        "openapi_extra": {
            "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}
        }
    }


def _json(answer: dict[str, Any]) -> Response:
    return Response(orjson.dumps(answer), media_type="application/json")


def make_indexer_router(service: IndexerService) -> APIRouter:
    """The RFC's four routes, and what is registered."""
    router = APIRouter(tags=["indexer"])

    @router.post("/register", summary="Follow an engine's KV events")
    async def register(registration: Registration) -> dict[str, str]:
        service.register(registration)
        return {"status": "registered successfully", "instance_id": registration.instance_id}

    @router.post("/unregister", summary="Forget an engine, or one rank of it")
    async def unregister(removal: Removal) -> dict[str, Any]:
        removed = service.unregister(removal)
        if not removed:
            raise HTTPException(
                404,
                f"instance {removal.instance_id!r} is not registered; GET /instances lists those that are",
            )
        names = [f"{known.instance_id}|{known.tenant}|{known.rank}" for known in removed]
        return {"status": "unregistered successfully", "removed_instances": names}

    @router.post(
        "/query", summary="Longest cached prefix of a prompt, by instance", **_documented(TokenQuery)
    )
    @router.post("/v1/cache/lookup", summary="The same under our own name", **_documented(TokenQuery))
    async def query(request: Request) -> Response:
        return _json(service.query_tokens(await _parsed(request, TokenQuery)))

    @router.post("/query_by_hash", summary="The same, by sequence hashes", **_documented(HashQuery))
    async def query_by_hash(request: Request) -> Response:
        return _json(service.query_hashes(await _parsed(request, HashQuery)))

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

    return router
