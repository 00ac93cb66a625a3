"""What is not inference reaches the conductor's application as it was sent, and its answer comes back whole."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse

from router.server import PlainServer
from router.workers.passing_on import PassedOn


class Sources:
    """Applications that are served, and stopped with the test."""

    def __init__(self, stack: AsyncExitStack, folder: Path) -> None:
        self._stack = stack
        self.path = folder / "rest"

    async def serve(self, app: Any, listening: socket.socket, *, date: bool = True) -> PlainServer:
        server = PlainServer(
            uvicorn.Config(
                app,
                ws="none",
                loop="none",
                log_config=None,
                server_header=False,
                date_header=date,
                timeout_graceful_shutdown=1,
            )
        )
        task = asyncio.create_task(server.serve(sockets=[listening]))
        while not server.started:
            await asyncio.sleep(0.002)

        async def stop() -> None:
            server.stop_soon()
            await task

        self._stack.push_async_callback(stop)
        return server

    async def rest(self, app: FastAPI) -> None:
        listening = socket.socket(socket.AF_UNIX)
        listening.bind(str(self.path))
        listening.setblocking(False)
        await self.serve(app, listening, date=False)

    async def client(self) -> httpx.AsyncClient:
        listening = socket.create_server(("127.0.0.1", 0))
        listening.setblocking(False)
        await self.serve(PassedOn(str(self.path)), listening)
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        client = httpx.AsyncClient(base_url=url, timeout=20, trust_env=False)
        return await self._stack.enter_async_context(client)


@pytest.fixture
async def sources(tmp_path: Path) -> AsyncIterator[Sources]:
    async with AsyncExitStack() as stack:
        yield Sources(stack, tmp_path)


def _echo() -> FastAPI:
    app = FastAPI()

    @app.api_route("/{path:path}", methods=["GET", "POST", "HEAD", "DELETE"])
    async def echo(request: Request) -> Response:
        body = await request.body()
        seen = f"{request.method} {request.url.path}?{request.url.query} {request.headers.get('x-a')} "
        headers = {"x-host": request.headers["host"], "x-length": str(len(body))}
        return Response(seen.encode() + body, 201, headers)

    return app


async def test_a_request_arrives_as_it_was_sent(sources: Sources) -> None:
    await sources.rest(_echo())
    client = await sources.client()
    got = await client.get("/v1/a%2Fb?x=1&y=%20", headers={"x-a": "b"})
    assert (got.status_code, got.text) == (201, "GET /v1/a/b?x=1&y=%20 b ")
    assert got.headers["x-host"] == client.base_url.netloc.decode()
    assert len(got.headers.get_list("date")) == 1
    posted = await client.post("/p", content=b"z" * 3_000_000)
    assert posted.headers["x-length"] == "3000000"
    assert posted.content.endswith(b"z" * 100)

    async def parts() -> AsyncIterator[bytes]:
        for number in range(50):
            yield b"%d," % number

    chunked = await client.post("/p", content=parts())
    assert chunked.headers["x-length"] == "140"
    assert (await client.head("/h")).content == b""
    assert (await client.delete("/d")).text == "DELETE /d? None "


async def test_a_long_answer_comes_as_it_is_made(sources: Sources) -> None:
    app, go = FastAPI(), asyncio.Event()

    @app.get("/stream")
    async def stream() -> StreamingResponse:
        async def parts() -> AsyncIterator[bytes]:
            yield b"first"
            await go.wait()
            yield b"second"

        return StreamingResponse(parts())

    await sources.rest(app)
    client = await sources.client()
    async with client.stream("GET", "/stream") as answer:
        received = answer.aiter_raw()
        assert await anext(received) == b"first"
        go.set()
        assert b"".join([part async for part in received]) == b"second"


async def test_a_client_that_leaves_ends_the_request(sources: Sources) -> None:
    app, ended = FastAPI(), asyncio.Event()

    @app.post("/upload")
    async def upload(request: Request) -> None:
        try:
            async for _ in request.stream():
                pass
        finally:
            ended.set()

    await sources.rest(app)
    client = await sources.client()
    assert client.base_url.port is not None
    _, writer = await asyncio.open_connection("127.0.0.1", client.base_url.port)
    writer.write(b"POST /upload HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\nsome")
    await asyncio.sleep(0.1)
    writer.transport.abort()
    async with asyncio.timeout(10):
        await ended.wait()


async def test_clients_that_do_not_end_their_requests_keep_nobody_waiting(sources: Sources) -> None:
    await sources.rest(_echo())
    client = await sources.client()
    assert client.base_url.port is not None
    writers = []
    for _ in range(120):
        _, writer = await asyncio.open_connection("127.0.0.1", client.base_url.port)
        writer.write(b"POST /upload HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\nsome")
        writers.append(writer)
    await asyncio.sleep(0.5)
    assert (await client.get("/health")).status_code == 201
    for writer in writers:
        writer.transport.abort()


async def test_without_the_conductor_the_answer_says_so(sources: Sources) -> None:
    client = await sources.client()
    answer = await client.get("/v1/models")
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "conductor_unavailable"
