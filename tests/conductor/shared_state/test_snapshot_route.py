"""The index for a replica that joins, over real HTTP: whole, and nothing of it stays behind."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import uvicorn
from fastapi import FastAPI

from conductor.shared_state import RedisLink, SharedState, make_shared_state_router
from conductor.shared_state.joining import SNAPSHOT_PATH
from conductor.shared_state_config import SharedStateConfig
from router.server import PlainServer, listen

BYTES = 30_000_000  # more than lies in buffers on the way


class Replica:
    def __init__(self) -> None:
        link = RedisLink("redis://127.0.0.1:1", "t", 0.1)
        shared = SharedState(SharedStateConfig(), link, "r", lambda: 0.0)
        app = FastAPI()
        app.include_router(make_shared_state_router(shared, lambda path: self.save(path)))
        self._server = PlainServer(
            uvicorn.Config(app, ws="none", loop="none", log_config=None, timeout_graceful_shutdown=1)
        )
        self.content = b"x"

    def save(self, path: Path) -> None:
        path.write_bytes(self.content)

    async def start(self) -> None:
        listening = listen("127.0.0.1", 0)
        self.port = listening.getsockname()[1]
        self._serving = await self._server.begin(listening)

    async def stop(self) -> None:
        self._server.stop_soon()
        await self._serving


@pytest.fixture
async def replica(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Replica]:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    replica = Replica()
    await replica.start()
    yield replica
    await replica.stop()


async def test_it_comes_whole(replica: Replica, tmp_path: Path) -> None:
    replica.content = bytes(range(256)) * 20_000
    async with httpx.AsyncClient(trust_env=False) as client:
        answer = await client.get(f"http://127.0.0.1:{replica.port}{SNAPSHOT_PATH}")
    assert answer.headers["content-length"] == str(len(replica.content)) and answer.content == replica.content
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("who", ["the replica", "the client"])
async def test_nothing_is_left_when_one_of_them_ends_meanwhile(
    replica: Replica, tmp_path: Path, who: str
) -> None:
    replica.content = bytes(BYTES)
    reader, writer = await asyncio.open_connection("127.0.0.1", replica.port)
    writer.write(b"GET %b HTTP/1.1\r\nhost: x\r\n\r\n" % SNAPSHOT_PATH.encode())
    assert b" 200 " in await reader.readline()
    if who == "the client":
        writer.transport.abort()
    await replica.stop()
    writer.transport.abort()
    assert not list(tmp_path.iterdir())


async def test_without_room_it_says_so(replica: Replica, tmp_path: Path) -> None:
    def full(path: Path) -> None:
        path.write_bytes(b"half of it")
        raise OSError(28, "No space left on device")

    replica.save = full  # type: ignore[method-assign]
    async with httpx.AsyncClient(trust_env=False) as client:
        answer = await client.get(f"http://127.0.0.1:{replica.port}{SNAPSHOT_PATH}")
    assert answer.status_code == 503 and "No space left" in answer.text
    assert not list(tmp_path.iterdir())
