"""Orders for the tiers of an emulated engine's cache over HTTP: load, evict and pin the blocks of a prompt.

Loading takes the time that the performance model gives to the bytes: from the host's memory by its speed, from
another emulated engine over the link that hand-offs arrive on. Both engines only exchange what they hold; a block
that the source lost is not there afterwards. These routes are the emulator's own, no engine's.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

import aiohttp
from pydantic import BaseModel, ConfigDict, Field, model_validator
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from simulator.block_hash import HashChain
from simulator.emulator.driver import EngineDriver
from simulator.emulator.hand_off import LinkTimer
from simulator.emulator.openai_api import ApiError, bad_request, parse
from simulator.kv_cache import KvCache
from simulator.performance import PerformanceModel

_PEER_TIMEOUT_S = 5.0


class TierRange(BaseModel):
    """Blocks ``start`` to ``stop`` (None: the last whole one) of a prompt, in a tier of a rank."""

    model_config = ConfigDict(extra="forbid")

    token_ids: Annotated[list[Annotated[int, Field(ge=0, lt=2**32)]], Field(min_length=1)] | None = None
    cache_salt: str | None = None
    start: Annotated[int, Field(ge=0)] = 0
    stop: Annotated[int, Field(ge=1)] | None = None
    tier: Literal["device", "host"] = "device"
    rank: Annotated[int, Field(ge=0)] = 0

    @model_validator(mode="after")
    def _a_range(self) -> Self:
        if self.stop is not None and self.stop <= self.start:
            raise ValueError(f"stop must be greater than start ({self.start})")
        return self


class LoadOrder(TierRange):
    """``peer``: the URL of the emulated engine that has it; without it this one's other tier has."""

    peer: Annotated[str, Field(pattern=r"^http://[^/\s]+$")] | None = None
    peer_tier: Literal["device", "host"] | None = None
    peer_rank: Annotated[int, Field(ge=0)] = 0


class TierAdmin:
    """The routes of one process's engines, by rank. ``arriving`` is the link that transfers come in on."""

    def __init__(
        self, drivers: Sequence[EngineDriver], arriving: LinkTimer, performance: PerformanceModel
    ) -> None:
        self._drivers = drivers
        self._arriving = arriving
        self._performance = performance
        self._names = (f"tier-load-{number}" for number in itertools.count())
        self._session: aiohttp.ClientSession | None = None

    def routes(self) -> list[Route]:
        verbs = ("held", "load", "evict", "pin", "unpin")
        return [Route(f"/kv_tiers/{verb}", getattr(self, verb), methods=["POST"]) for verb in verbs]

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def held(self, request: Request) -> Response:
        """How many blocks of the range are in the tier, without a gap from its start."""
        order = parse(TierRange, await request.body())
        cache, chain, stop = self._range(order)
        return _blocks(_held(cache, chain, order.tier, stop) - order.start)

    async def load(self, request: Request) -> Response:
        """Bring blocks to the tier; how many of the range are there then."""
        order = parse(LoadOrder, await request.body())
        cache, chain, stop = self._range(order)
        there = _held(cache, chain, order.tier, stop)
        if there < stop:
            there = max(there, await self._arrive(order, cache, chain, there, stop))
        return _blocks(there - order.start)

    async def evict(self, request: Request) -> Response:
        """Forget blocks that no request uses; without a prompt all of them."""
        order = parse(TierRange, await request.body())
        cache = self._cache(order)
        if order.token_ids is None:
            if cache.host is not None and order.tier == "host":
                dropped = cache.host.drop(cache.host.digests())
            else:
                dropped = cache.drop_all()
        else:
            _, chain, stop = self._range(order)
            if cache.host is not None and order.tier == "host":
                dropped = cache.host.drop(chain.digests(stop)[order.start : stop])
            else:
                dropped = cache.drop(chain, order.start, stop)
        self._drivers[order.rank].cache_changed()
        return _blocks(dropped)

    async def pin(self, request: Request) -> Response:
        """Keep blocks, half of the tier at most; how many of the range from its start are kept."""
        order = parse(TierRange, await request.body())
        cache, chain, stop = self._range(order)
        if cache.host is not None and order.tier == "host":
            return _blocks(cache.host.pin(chain.digests(stop)[order.start : stop]))
        return _blocks(cache.pin(chain, order.start, stop))

    async def unpin(self, request: Request) -> Response:
        """How many blocks of the range were kept until now."""
        order = parse(TierRange, await request.body())
        cache, chain, stop = self._range(order)
        if cache.host is not None and order.tier == "host":
            return _blocks(cache.host.unpin(chain.digests(stop)[order.start : stop]))
        return _blocks(cache.unpin(chain, order.start, stop))

    async def _arrive(self, order: LoadOrder, cache: KvCache, chain: HashChain, there: int, stop: int) -> int:
        """Wait for the bytes that are missing, and put down those that the source still has."""
        tokens = cache.block_size
        if order.peer is not None:
            stop = min(stop, await self._peer_has(order, stop))
            missing = max(stop - there, 0) * tokens
            if missing:
                size_bytes = round(missing * self._performance.kv_bytes_per_token)
                await self._arriving.transfer(next(self._names), size_bytes)
                stop = min(stop, await self._peer_has(order, stop))  # it may have lost some meanwhile
        else:
            other: Literal["device", "host"] = "host" if order.tier == "device" else "device"
            stop = min(stop, _held(cache, chain, other, stop))
            await asyncio.sleep(self._performance.host_load_s(max(stop - there, 0) * tokens))
            stop = min(stop, _held(cache, chain, other, stop))
        if stop <= there:
            return there
        arrived = cache.place(chain, stop) if order.tier == "device" else _stored(cache, chain, stop)
        self._drivers[order.rank].cache_changed()
        return arrived

    async def _peer_has(self, order: LoadOrder, stop: int) -> int:
        asked = {
            "token_ids": order.token_ids,
            "cache_salt": order.cache_salt,
            "stop": stop,
            "rank": order.peer_rank,
        }
        if self._session is None:
            self._session = aiohttp.ClientSession()
        most = 0
        for tier in (order.peer_tier,) if order.peer_tier is not None else ("device", "host"):
            try:
                async with (
                    asyncio.timeout(_PEER_TIMEOUT_S),
                    self._session.post(f"{order.peer}/kv_tiers/held", json={**asked, "tier": tier}) as answer,
                ):
                    if answer.status == 400 and order.peer_tier is None:
                        continue  # without a host tier
                    answer.raise_for_status()
                    most = max(most, int((await answer.json())["blocks"]))
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                raise ApiError(
                    502, f"The peer {order.peer} does not answer: {error}", "BadGatewayError", "peer"
                ) from None
        return most

    def _range(self, order: TierRange) -> tuple[KvCache, HashChain, int]:
        """The cache, the prompt's chain and the block where the range ends."""
        cache = self._cache(order)
        if order.token_ids is None:
            raise bad_request("token_ids is required here.", "token_ids")
        whole = len(order.token_ids) // cache.block_size
        stop = whole if order.stop is None else order.stop
        if stop > whole or order.start >= stop:
            raise bad_request(
                f"Blocks {order.start} to {stop} are not among the {whole} whole blocks of "
                f"{cache.block_size} tokens.",
                "stop",
            )
        return cache, HashChain(order.token_ids, cache.block_size, order.cache_salt), stop

    def _cache(self, order: TierRange) -> KvCache:
        if order.rank >= len(self._drivers):
            raise bad_request(f"There are ranks 0 to {len(self._drivers) - 1}.", "rank")
        cache = self._drivers[order.rank].engine.cache
        if order.tier == "host" and cache.host is None:
            raise bad_request("This engine has no host tier (--host-blocks).", "tier")
        return cache


def _held(cache: KvCache, chain: HashChain, tier: Literal["device", "host"], stop: int) -> int:
    """Leading blocks of a prompt in one tier."""
    if tier == "host":
        return 0 if cache.host is None else cache.host.run(chain, 0, stop)
    return cache.held(chain, stop)


def _stored(cache: KvCache, chain: HashChain, stop: int) -> int:
    assert cache.host is not None
    return cache.host.store(chain, 0, stop)


def _blocks(count: int) -> Response:
    answer: dict[str, Any] = {"blocks": max(count, 0)}
    return JSONResponse(answer)
