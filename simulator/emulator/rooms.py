"""Moving a KV cache as SGLang's servers do: prefill and decode get the request at once and meet in a *room*.

The prefill engine runs a bootstrap server. The decode engine asks it for the room that its request names, waits
there until the prompt is computed, and then pulls the blocks as it does with NIXL's fields (`hand_off`); only
then does the prefill engine answer, with one token. What is said between the two is ours, not SGLang's.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Final, Literal

import aiohttp
from aiohttp import web

from simulator.emulator.driver import RequestFailed
from simulator.emulator.hand_off import KvPuller, KvTransferParams
from simulator.sequence import Sequence

_AGAIN_S: Final = 0.1  # between attempts to reach a bootstrap server


@dataclass(frozen=True, slots=True)
class RoomPlace:
    """A room, and whose bootstrap server knows it."""

    host: str
    port: int
    room: int


class Rooms:
    """The prefill side: what is offered in each room, and who waits for it."""

    def __init__(self, host: str, port: int) -> None:
        self._host = host
        self._port = port
        self._offers: dict[int, asyncio.Future[Any]] = {}

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Serve the rooms over HTTP. Raises OSError where the port is taken."""
        app = web.Application()
        app.router.add_get("/rooms/{room:\\d+}", self._enter)
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
        await runner.setup()
        try:
            await web.TCPSite(runner, self._host, self._port, shutdown_timeout=0.5).start()
            yield
        finally:
            for room in list(self._offers):
                self.withdraw(room)
            await runner.cleanup()

    def offer(self, room: int, params: Any) -> None:
        """The prompt of this room is computed: whoever waits for it learns where its blocks are."""
        offer = self._offer(room)
        if not offer.done():
            offer.set_result(params)

    def withdraw(self, room: int) -> None:
        """Nothing will be found there any more; whoever waits is told so."""
        offer = self._offers.pop(room, None)
        if offer is not None:
            offer.cancel()

    def _offer(self, room: int) -> asyncio.Future[Any]:
        offer = self._offers.get(room)
        if offer is None:
            offer = self._offers[room] = asyncio.get_running_loop().create_future()
        return offer

    async def _enter(self, request: web.Request) -> web.Response:
        offer = self._offer(int(request.match_info["room"]))
        await asyncio.wait((offer,))
        if offer.cancelled():
            return web.json_response({"error": "the request of this room is gone"}, status=404)
        return web.json_response(offer.result())


class RoomVisitor:
    """The decode side. ``timeout_s`` is how long a room may stay empty, ``unreachable_s`` its server away.

    With ``lost`` "hang" a request whose room fails is never answered.
    """

    def __init__(
        self, puller: KvPuller, *, timeout_s: float, unreachable_s: float, lost: Literal["fail", "hang"]
    ) -> None:
        self._puller = puller
        self._timeout_s = timeout_s
        self._unreachable_s = unreachable_s
        self._lost = lost
        self._session: aiohttp.ClientSession | None = None

    async def pull(self, sequence: Sequence, place: RoomPlace) -> None:
        """Fetch what ``sequence`` lacks once it is there; `RequestFailed` if it never is."""
        try:
            async with asyncio.timeout(self._timeout_s):
                params = await self._wait(place)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            if self._lost == "hang":
                await asyncio.get_running_loop().create_future()
            reason = str(error) or f"empty for {self._timeout_s:g} s"
            raise RequestFailed(f"KV transfer through room {place.room} failed: {reason}") from error
        await self._puller.pull(sequence, KvTransferParams.model_validate(params))

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def _wait(self, place: RoomPlace) -> Any:
        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None))
        url = f"http://{place.host}:{place.port}/rooms/{place.room}"
        given_up_s = time.monotonic() + self._unreachable_s
        while True:
            try:
                async with self._session.get(url) as response:
                    response.raise_for_status()
                    return await response.json()
            except aiohttp.ClientConnectionError:
                if time.monotonic() >= given_up_s:
                    raise
                await asyncio.sleep(_AGAIN_S)
