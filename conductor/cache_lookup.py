"""How much of a prompt is cached, and by whom: questions over HTTP, and their answers.

Counts are tokens. ``GPU``, ``CPU`` and ``DISK`` are cumulative: the longest prefix reachable within the device,
within device and host, and within all tiers; ``longest_matched`` is the last of them; ``DP`` has it for every
data-parallel rank. What LMCache servers hold counts for the engines that use them.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Protocol, TypeVar

import numpy as np
import orjson
from fastapi import APIRouter, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError

from cache_index import CacheIndex, Namespace, PromptMatcher, Tier
from cache_index.hashing import Tokens
from cache_index.lmcache_directory import is_lmcache
from cache_index.prompt_match import Levels
from conductor.rest import answers

DEFAULT_TENANT = "default"
_COUNTED = [Tier.DEVICE, Tier.HOST, len(Tier) - 1]

TokenId = Annotated[int, Field(ge=0, lt=2**32)]
BlockSize = Annotated[int, Field(gt=0, le=65_536)]


class LookupQuery(BaseModel):
    """Whose cache of what; all block sizes and instances unless named."""

    # Fields of later versions of the RFC must not turn a working client away.
    model_config = ConfigDict(extra="ignore", populate_by_name=True)

    model: Annotated[
        str, Field(min_length=1, validation_alias=AliasChoices("model", "modelname", "model_name"))
    ]
    lora_name: str | None = None
    tenant_id: str | None = None
    instance_id: str | None = None
    block_size: BlockSize | None = None
    cache_salt: str | None = None

    @property
    def tenant(self) -> str:
        return self.tenant_id or DEFAULT_TENANT


class TokenQuery(LookupQuery):
    """Who has the longest prefix of this prompt?"""

    token_ids: list[TokenId]


Query = TypeVar("Query", bound=BaseModel)


class KnownRank(Protocol):
    """A rank of an engine, which is listed also when it has nothing."""

    @property
    def row(self) -> int:
        """Of the holder in match results."""
        ...

    @property
    def instance_id(self) -> str: ...

    @property
    def rank(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Asked:
    """What a query is about: where to look, and which ranks are found there."""

    namespace: Namespace
    ranks: Sequence[KnownRank]


def tokens_by_instance(
    index: CacheIndex,
    asked: Iterable[Asked],
    levels: Callable[[Namespace], Levels],
    *,
    engines: Container[int],
    instance_id: str | None = None,
    stores: bool = False,
) -> dict[str, dict[str, Any]]:
    """Cached tokens by instance. ``engines`` are the rows of all ranks, those not asked for included.

    Others are listed when they hold something; with ``stores`` LMCache's servers and shared stores are, too.
    """
    answer: dict[str, dict[str, Any]] = {}
    for group in asked:
        matched = levels(group.namespace)
        found = (matched[:, _COUNTED] * group.namespace.block_size).tolist()
        for known in group.ranks:
            if instance_id in (None, known.instance_id) and known.row < len(found):
                _add(answer, known.instance_id, known.rank, found[known.row])
        for row, counts in enumerate(found):
            if not counts[-1] or row in engines:
                continue
            holder = index.holder(row)
            if holder is None or (is_lmcache(holder) and not stores):
                continue
            if instance_id in (None, holder.instance_id):
                _add(answer, holder.instance_id, holder.rank, counts)
    return answer


def _add(answer: dict[str, dict[str, Any]], instance_id: str, rank: int, counts: list[int]) -> None:
    """Add a rank's tokens by tier to its instance, whose values are those of its best rank."""
    device, host, all_tiers = counts
    entry = answer.get(instance_id)
    if entry is None:
        best = {"longest_matched": all_tiers, "GPU": device, "CPU": host, "DISK": all_tiers}
        answer[instance_id] = {**best, "DP": {str(rank): all_tiers}}
        return
    for name, value in (("longest_matched", all_tiers), ("GPU", device), ("CPU", host), ("DISK", all_tiers)):
        entry[name] = max(entry[name], value)
    entry["DP"][str(rank)] = all_tiers


async def parsed(request: Request, kind: type[Query]) -> Query:
    """The body, parsed and checked in one pass."""
    return _checked(await request.body(), kind)


def _checked(body: bytes, kind: type[Query]) -> Query:
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise RequestValidationError(error.errors(include_url=False, include_context=False)) from None


async def parsed_prompt(request: Request) -> tuple[LookupQuery, Tokens]:
    """A TokenQuery with its tokens as an array. Prompts are long and checking them one by one is most of a
    query's time, so they are checked by the conversion, and by the model only to say what is wrong."""
    body = await request.body()
    try:
        fields = orjson.loads(body)
        tokens = np.frombuffer(array("I", fields.pop("token_ids")), np.uint32)
        return LookupQuery.model_validate(fields), tokens
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
        query = _checked(body, TokenQuery)
        return query, np.array(query.token_ids, np.uint32)


def documented(kind: type[BaseModel]) -> dict[str, Any]:
    """What FastAPI would have found in the signature."""
    schema = kind.model_json_schema()
    return {
        "openapi_extra": {
            "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}
        },
        "responses": answers.refusals(422),
    }


def json_answer(answer: Mapping[str, Any]) -> Response:
    return Response(orjson.dumps(answer), media_type="application/json")


class Engines(Protocol):
    """The ranks that can be asked for."""

    def asked(self, query: LookupQuery) -> Iterator[Asked]: ...

    def rows(self) -> Container[int]:
        """Of all ranks, in match results."""
        ...


def make_lookup_router(index: CacheIndex, prompts: PromptMatcher, engines: Engines) -> APIRouter:
    """``/v1/cache/lookup`` over what ``engines`` and everybody else hold."""
    router = APIRouter(tags=["cache"])

    @router.post(
        "/v1/cache/lookup",
        summary="Longest cached prefix of a prompt, by instance and store",
        **documented(TokenQuery),
    )
    async def lookup(request: Request) -> Response:
        """What the LMCache servers of an instance hold counts for it; they and the stores that they share are
        listed as well. Values are tokens; `GPU`, `CPU` and `DISK` are cumulative."""
        query, tokens = await parsed_prompt(request)
        answer = tokens_by_instance(
            index,
            engines.asked(query),
            lambda namespace: prompts.match(namespace, tokens, cache_salt=query.cache_salt),
            engines=engines.rows(),
            instance_id=query.instance_id,
            stores=True,
        )
        return json_answer({query.tenant: answer})

    return router
