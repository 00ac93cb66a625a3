"""Moving a KV cache from a prefill to a decode instance, with the request fields of vLLM's NIXL connector.

The decode instance contacts the prefill process (``GET /kv_transfers/ID`` to see that the blocks are still
leased, ``DELETE`` once it has read them) and waits as long as the bytes it lacks take on its link.

Deviations from NIXL, on purpose: vLLM's decode reports 0 ``cached_tokens`` for pulled tokens, ours reports the
prefill instance's hit (``remote_prefill_cached_tokens``) if that is larger than its own, so that a client sees
the reuse of the whole path; and a lease that is gone fails the request as an unreachable prefill does, where
vLLM would read whatever the blocks hold by then.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from math import inf
from typing import Any, Literal
from urllib.parse import quote

import aiohttp
from pydantic import BaseModel, ConfigDict, model_validator

from simulator.emulator.driver import RequestFailed
from simulator.engine import Lease
from simulator.link import SharedLink
from simulator.sequence import Sequence


class KvTransferParams(BaseModel):
    """``kv_transfer_params`` of a request; unknown fields pass, newer engines have more."""

    model_config = ConfigDict(extra="allow", frozen=True)

    do_remote_decode: bool = False
    do_remote_prefill: bool = False
    remote_request_id: str | None = None
    remote_engine_id: str | None = None
    remote_host: str | None = None
    remote_port: int | None = None
    remote_num_tokens: int | None = None
    remote_prefill_cached_tokens: int | None = None

    @model_validator(mode="after")
    def _complete(self) -> KvTransferParams:
        if self.do_remote_prefill and self.do_remote_decode:
            raise ValueError("do_remote_prefill and do_remote_decode exclude each other")
        if self.do_remote_prefill and None in (self.remote_request_id, self.remote_host, self.remote_port):
            raise ValueError("do_remote_prefill needs remote_request_id, remote_host and remote_port")
        return self


def offered_params(lease: Lease, *, request_id: str, engine_id: str, host: str, port: int, hit: int) -> Any:
    """What a prefill instance answers in ``kv_transfer_params``, for the decode instance to pull with."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [list(lease.blocks)],
        "remote_engine_id": engine_id,
        "remote_request_id": request_id,
        "remote_host": host,
        "remote_port": port,
        "tp_size": 1,
        "dcp_size": 1,
        "pp_size": 1,
        "remote_num_tokens": lease.tokens,
        "remote_blocks_expiry_time": None,
        "transfer_mode": "pull",
        "remote_prefill_cached_tokens": hit,
    }


class LinkTimer:
    """A shared link in real time."""

    def __init__(self, link: SharedLink, clock: Callable[[], float] = time.monotonic) -> None:
        self._link = link
        self._clock = clock
        self._waiting: dict[str, asyncio.Future[None]] = {}
        self._timer: asyncio.TimerHandle | None = None

    async def transfer(self, name: str, size_bytes: int) -> None:
        """Return when ``size_bytes`` have passed the link; cancelling gives the bandwidth back."""
        self._link.start(name, size_bytes, self._clock())
        self._waiting[name] = asyncio.get_running_loop().create_future()
        self._tick()
        try:
            await self._waiting[name]
        finally:
            self._link.cancel(name, self._clock())
            del self._waiting[name]
            self._tick()

    def _tick(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for name in self._link.finished(self._clock()):
            if not self._waiting[name].done():
                self._waiting[name].set_result(None)
        if self._link.next_end_s != inf:
            delay_s = max(self._link.next_end_s - self._clock(), 0.0)
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._tick)


class KvPuller:
    """The decode side: fetches leased KV caches from prefill instances.

    ``timeout_s`` is how long an unreachable prefill instance, or a lease that is gone, takes to fail the
    request (5 s in vLLM); with ``lost`` "hang" the request is never answered.
    """

    def __init__(
        self,
        link: LinkTimer,
        *,
        kv_bytes_per_token: float,
        timeout_s: float,
        lost: Literal["fail", "hang"] = "fail",
    ) -> None:
        self._link = link
        self._kv_bytes_per_token = kv_bytes_per_token
        self._timeout_s = timeout_s
        self._lost = lost
        self._session: aiohttp.ClientSession | None = None
        self.failures = 0

    async def pull(self, sequence: Sequence, params: KvTransferParams) -> None:
        """Fetch what ``sequence`` lacks; `RequestFailed` if the prefill instance does not have it."""
        started_s = time.monotonic()
        url = f"http://{params.remote_host}:{params.remote_port}/kv_transfers/"
        url += quote(params.remote_request_id or "", safe="")
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._ask("GET", url)
            size_bytes = round(sequence.pull_tokens * self._kv_bytes_per_token)
            await self._link.transfer(sequence.request_id, size_bytes)
            started_s = time.monotonic()
            async with asyncio.timeout(self._timeout_s):
                await self._ask("DELETE", url)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            self.failures += 1
            if self._lost == "hang":
                await asyncio.get_running_loop().create_future()
            await asyncio.sleep(max(started_s + self._timeout_s - time.monotonic(), 0.0))
            reason = str(error) or type(error).__name__
            raise RequestFailed(f"KV transfer of {params.remote_request_id} failed: {reason}") from error

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def _ask(self, method: str, url: str) -> None:
        if self._session is None:
            self._session = aiohttp.ClientSession()
        async with self._session.request(method, url) as response:
            response.raise_for_status()
