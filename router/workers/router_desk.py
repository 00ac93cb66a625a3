"""The conductor's end for routers elsewhere: the desk of the workers, over TCP and with a token."""

from __future__ import annotations

import asyncio
import hmac
import socket
from collections.abc import Callable

import msgspec
import structlog

from router.services import RouterServices
from router.workers.desk import PlacementDesk, WorkerLink
from router.workers.messages import (
    FromWorker,
    Hello,
    Instances,
    MessageError,
    Place,
    Ready,
    Samples,
    Setup,
)

logger = structlog.get_logger("router")

_TELL_EVERY_S = 0.5
_MOST_UNHEARD = 20  # times that it was told or could have been; routers ping more often than that


class RouterDesk(PlacementDesk):
    """``instances`` tells who can take requests now; every router hears of changes."""

    def __init__(
        self, services: RouterServices, setup: Setup, token: str, instances: Callable[[], Instances]
    ) -> None:
        super().__init__(services, setup)
        self.token = token
        self.instances = instances
        self._listening: asyncio.Server | None = None

    async def listen(self, host: str, port: int) -> int:
        """The port that is listened on. Raises OSError."""
        loop = asyncio.get_running_loop()
        self._listening = await loop.create_server(lambda: RouterLink(self), host, port)
        return int(self._listening.sockets[0].getsockname()[1])

    async def tell_forever(self) -> None:
        """Routers hear who can take requests, whenever that has changed; those that are silent are hung up on.

        The machine of a router may end without a word, and what it had reserved would stay so. Time in which this
        process itself stood still does not count.
        """
        told = b""
        while True:
            await asyncio.sleep(_TELL_EVERY_S)
            for link in list(self.links):
                link.unheard += 1
                if link.unheard > _MOST_UNHEARD and isinstance(link, RouterLink):
                    link.hang_up()
            now = self.instances()
            encoded = msgspec.msgpack.encode(now)
            if encoded != told:
                told = encoded
                for link in self.links:
                    if link.greeted:
                        link.send(now)

    def close(self) -> None:
        if self._listening is not None:
            self._listening.close()
        super().close()


class RouterLink(WorkerLink):
    """One router's connection; nothing is done for one that has not shown the token."""

    def __init__(self, desk: RouterDesk) -> None:
        super().__init__(desk)
        self._routers = desk
        self._ahead_s = 0.0  # of the router's clock, the clock here

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        super().connection_made(transport)

    def hang_up(self) -> None:
        """Nothing came for too long."""
        if self.greeted:
            logger.warning("a router is silent and taken for gone", pid=self.pid)
        self.close()

    def _receive(self, message: FromWorker) -> None:
        if not self.greeted:
            self._greet(message)
            return
        if isinstance(message, Hello | Ready | Samples):
            raise MessageError("only a worker of this machine says that")
        if isinstance(message, Place) and message.request.arrived_s is not None:
            message.request.arrived_s += self._ahead_s
        super()._receive(message)

    def _greet(self, message: FromWorker) -> None:
        known = isinstance(message, Hello) and hmac.compare_digest(
            message.token.encode(), self._routers.token.encode()
        )
        if not isinstance(message, Hello) or not known:
            raise MessageError("a router must first show server.admin_token")
        self._ahead_s = self._clock() - message.clock_s
        super()._receive(message)
        self.worker = -1  # it is counted by itself
        self.send(self._routers.instances())
        logger.info("a router is here", pid=message.pid)
