"""A front door between a client and an engine whose connections are no sockets: any bytes, in any pieces."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import uvicorn
from uvicorn.server import ServerState

from conductor.placement import Target
from router import KeyRing, RouterServices, RouterSettings, create_app
from router.front_door import FrontDoorProtocol, front_door_protocol
from router.upstream import UpstreamConnection
from tests.router.conftest import Placements

TARGET = Target("e0", "http://127.0.0.1:1", "127.0.0.1", 1)
ANSWER = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"


class Wire:
    """A client's connection: keeps what is written."""

    def __init__(self) -> None:
        self.written = b""
        self.closing = False
        self.ended = False
        self.paused = False

    def write(self, data: bytes) -> None:
        assert not self.ended, "written behind the end"
        self.written += data

    def writelines(self, pieces: tuple[bytes, ...]) -> None:
        self.write(b"".join(pieces))

    def close(self) -> None:
        self.closing = True

    abort = close

    def write_eof(self) -> None:
        self.ended = True

    def can_write_eof(self) -> bool:
        return True

    def is_closing(self) -> bool:
        return self.closing

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def get_write_buffer_size(self) -> int:
        return 0

    def set_write_buffer_limits(self, high: int) -> None:
        pass

    def pause_reading(self) -> None:
        self.paused = True

    def resume_reading(self) -> None:
        self.paused = False


class EngineWire(Wire):
    """An engine's connection: answers every request in these pieces, ``turns`` of the event loop later."""

    def __init__(self, seen: list[bytes], answer: list[bytes], turns: int) -> None:
        super().__init__()
        self.connection: Any = None
        self._seen = seen
        self._pieces = answer
        self._turns = turns

    def write(self, data: bytes) -> None:
        super().write(data)
        head, _, body = self.written.partition(b"\r\n\r\n")
        found = re.search(rb"content-length: (\d+)", head)
        assert found is not None
        if len(body) == int(found[1]):
            self._seen.append(without_ids(self.written))
            self.written = b""
            self._answer(self._turns)

    def _answer(self, turns: int) -> None:
        if self.closing:
            return
        if turns:
            asyncio.get_running_loop().call_soon(self._answer, turns - 1)
            return
        for piece in self._pieces:
            self.connection.data_received(piece)


class Door:
    """A front door without sockets. ``knows``: it remembers heads."""

    def __init__(
        self,
        *,
        knows: bool = True,
        answer: list[bytes] | None = None,
        turns: int = 1,
        max_body_bytes: int = 4_096,
        keys: KeyRing | None = None,
    ) -> None:
        settings = RouterSettings(max_body_bytes=max_body_bytes, log_requests=False)
        self.target = TARGET
        self.placements = Placements([TARGET])
        self.services = RouterServices(self.placements, settings=settings, keys=keys)
        if not knows:
            self.services.known_heads.look_up = lambda data: None  # type: ignore[method-assign]
        self.seen: list[bytes] = []
        self._answer = [ANSWER] if answer is None else answer
        self._turns = turns
        self._config = uvicorn.Config(
            create_app(self.services),
            http=front_door_protocol(self.services),
            ws="none",
            loop="none",
            log_config=None,
        )
        self._config.load()

    def client(self) -> tuple[FrontDoorProtocol, Wire]:
        pool = self.services.pool.instance(TARGET)
        while len(pool.idle) < 4:
            wire = EngineWire(self.seen, self._answer, self._turns)
            wire.connection = UpstreamConnection(pool)
            wire.connection.connection_made(wire)
            pool.release(wire.connection)
        make: Any = self._config.http_protocol_class
        protocol = make(config=self._config, server_state=ServerState(), app_state={})
        client = Wire()
        protocol.connection_made(client)
        return protocol, client

    async def exchange(self, pieces: list[bytes], before: bytes = b"") -> tuple[bytes, bool]:
        """What a client gets that sends these pieces, and whether its connection ends.

        ``before`` is sent first, and answered, unless that ends the connection.
        """
        protocol, wire = self.client()
        if before:
            protocol.data_received(before)
            await settled(100)
            if wire.closing or wire.ended:
                protocol, wire = self.client()
            wire.written = b""
            self.seen.clear()
        for piece in pieces:
            if wire.paused:
                await settled(100)
            if wire.closing or wire.paused:
                break
            protocol.data_received(piece)
            await settled()
        await settled(100)
        outcome = without_ids(wire.written), wire.closing or wire.ended
        protocol.connection_lost(None)
        await settled()
        return outcome


async def settled(turns: int = 12) -> None:
    for _ in range(turns):
        await asyncio.sleep(0)


def without_ids(data: bytes) -> bytes:
    data = re.sub(rb"[0-9a-f]{12}-[0-9a-f]+", b"ID", data)
    return re.sub(rb"placement-id: \S+|date: [^\r]+", b"", data)
