"""Serves the front door: a listening socket, uvicorn with our protocol, and an orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import ssl
from collections.abc import Generator
from pathlib import Path
from typing import Any

import uvicorn

from router.front_door import front_door_protocol
from router.heads import host_in_url
from router.services import RouterServices

BACKLOG = 4_096
HANDSHAKE_WITHIN_S = 10.0
CLOSING_WITHIN_S = 1.0  # many clients leave the end of an idle connection unread until they use it again
_LAST_WRITES_TICKS = 50


class PlainServer(uvicorn.Server):
    """uvicorn's server without its signal handlers: who starts the front door decides when it stops."""

    def __init__(self, config: uvicorn.Config, tls: ssl.SSLContext | None = None) -> None:
        super().__init__(config)
        self._tls = tls
        self._stopping = asyncio.Event()

    def stop_soon(self) -> None:
        """From the loop's thread: listen no longer, and finish what has begun."""
        self.should_exit = True
        self._stopping.set()

    async def main_loop(self) -> None:
        """uvicorn's own looks ten times a second whether it shall end; the dates of answers need one."""
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), 1.0)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's own, but over as soon as the last connection is."""
        for listening in (*self.servers, *(sockets or ())):
            listening.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        try:
            async with asyncio.timeout(self.config.timeout_graceful_shutdown):
                while self.server_state.connections or self.server_state.tasks:
                    await asyncio.sleep(0.005)
                for server in self.servers:
                    await server.wait_closed()
        except TimeoutError:
            for task in self.server_state.tasks:
                task.cancel()
        await self.lifespan.shutdown()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """uvicorn's own has no time limits for TLS, and would wait half a minute for every idle client."""
        if self._tls is None:
            await super().startup(sockets)
            return
        await self.lifespan.startup()
        config = self.config

        def connection() -> asyncio.Protocol:
            return config.http_protocol_class(  # type: ignore[call-arg]
                config=config, server_state=self.server_state, app_state=self.lifespan.state
            )

        loop = asyncio.get_running_loop()
        self.servers = [
            await loop.create_server(
                connection,
                sock=listening,
                ssl=self._tls,
                backlog=config.backlog,
                ssl_handshake_timeout=HANDSHAKE_WITHIN_S,
                ssl_shutdown_timeout=CLOSING_WITHIN_S,
            )
            for listening in sockets or ()
        ]
        self.started = True

    async def begin(self, listening: socket.socket) -> asyncio.Task[None]:
        """Serve on a bound socket; returns once connections are accepted. Raises what kept it from starting."""
        serving = asyncio.get_running_loop().create_task(self.serve(sockets=[listening]))
        while not self.started and not serving.done():
            await asyncio.sleep(0.005)
        if serving.done():
            await serving
        return serving

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


class FrontDoorServer:
    """Serves inference requests through ``services`` and all others through the ASGI application ``app``.

    ``port`` 0 takes a free one. ``listening`` is a socket that is bound already. With ``reuse_port`` several
    processes can listen on the same port. With ``tls`` nothing else is spoken.
    """

    def __init__(
        self,
        app: Any,
        services: RouterServices,
        *,
        host: str = "127.0.0.1",
        port: int = 8000,
        reuse_port: bool = False,
        tls: ssl.SSLContext | None = None,
        listening: socket.socket | None = None,
    ) -> None:
        self.services = services
        self._host = host
        self._port = port
        self._reuse_port = reuse_port
        self._tls = tls is not None
        settings = services.settings
        self._config = uvicorn.Config(
            app,
            http=front_door_protocol(services),
            ws="none",
            loop="none",
            log_config=None,
            access_log=False,
            server_header=False,
            backlog=BACKLOG,
            timeout_keep_alive=settings.keep_alive_timeout_s,
            timeout_graceful_shutdown=settings.shutdown_timeout_s,
        )
        self._server = PlainServer(self._config, tls)
        self._task: asyncio.Task[None] | None = None
        self._socket = listening

    @property
    def port(self) -> int:
        """The port that is listened on, once started."""
        return self._port

    @property
    def url(self) -> str:
        return address_url(self._host, self._port, tls=self._tls)

    async def start(self) -> None:
        """Listen. Raises OSError when the address cannot be bound."""
        if self._socket is None:
            self._socket = listen(self._host, self._port, reuse_port=self._reuse_port)
        self._port = self._socket.getsockname()[1]
        self.services.start()
        self._task = await self._server.begin(self._socket)

    async def wait_closed(self) -> None:
        if self._task is not None:
            await asyncio.wait([self._task])

    async def stop(self) -> None:
        """Stop listening, let requests in progress finish until the deadline, then end them."""
        self._server.stop_soon()
        if self._task is not None:
            await self._task
        self.services.close()
        for _ in range(_LAST_WRITES_TICKS):  # let the last bytes out
            if not self._server.server_state.connections:
                break
            await asyncio.sleep(0.01)

    def stop_soon(self) -> None:
        """Like :meth:`stop`, from a signal handler; ``wait_closed`` tells when the requests are done."""
        self._server.stop_soon()


def address_url(host: str, port: int, *, tls: bool) -> str:
    return f"{'https' if tls else 'http'}://{host_in_url(host)}:{port}"


def private_socket(path: Path) -> socket.socket:
    """A bound Unix socket that only this user can reach. Raises OSError."""
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)
    try:
        bound.bind(str(path))
    except OSError:
        bound.close()
        raise
    finally:
        os.umask(before)
    bound.setblocking(False)
    return bound


def listen(host: str, port: int, *, reuse_port: bool = False) -> socket.socket:
    """A bound socket for uvicorn. Raises OSError when the address cannot be bound."""
    listening = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if reuse_port:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listening.bind((host, port))
        listening.setblocking(False)
    except OSError:
        listening.close()
        raise
    return listening


async def serve(app: Any, services: RouterServices, *, host: str, port: int, **options: Any) -> None:
    """Serve until SIGINT or SIGTERM. ``options`` are those of :class:`FrontDoorServer`."""
    server = FrontDoorServer(app, services, host=host, port=port, **options)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, server.stop_soon)
    try:
        await server.start()
        await server.wait_closed()
    finally:
        await server.stop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
