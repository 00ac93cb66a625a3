"""Requests that end otherwise than they began: trailers, endless heads, and bodies that break off."""

from __future__ import annotations

import asyncio
import hashlib
from typing import Any

import orjson
import pytest
import structlog
from fastapi import APIRouter, Request

from router import ApiKey, KeyRing

CHUNKED = b"POST %b HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
CHAT = CHUNKED % b"/v1/chat/completions"
TRAILERS = (
    b"0\r\nauthorization: Bearer k\r\nx-api-key: k\r\nx-conductor-tenant: other\r\nx-conductor-priority: 8\r\n"
    b"x-request-id: forged\r\nx-more: 1\r\n\r\n"
)


def refusal(received: bytes, status: int) -> dict[str, Any]:
    """The error of the one answer that was received."""
    head, _, body = received.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status)
    assert b"connection: close" in head and body.count(b"HTTP/1.1") == 0
    error: dict[str, Any] = orjson.loads(body)["error"]
    return error


@pytest.mark.parametrize("at_once", [True, False])
async def test_trailers_are_neither_believed_nor_forwarded(cluster: Any, at_once: bool) -> None:
    engine = await cluster.engine()
    door = await cluster.door([engine])
    connection = await door.connect()
    connection.send(CHAT + cluster.chunk(orjson.dumps(cluster.chat_document())))
    if not at_once:
        await asyncio.sleep(0.05)  # what is sent next arrives apart
    connection.send(TRAILERS)
    head, _ = await connection.response()
    assert head.startswith(b"HTTP/1.1 200 ") and b"forged" not in head
    [received] = engine.received
    names = {name.lower() for name, _ in received.fields}
    assert names == {"host", "content-length", "x-request-id"}
    [asked] = door.placements.asked
    assert (asked.tenant, asked.priority) == ("default", 0)
    connection.send(cluster.post(orjson.dumps(cluster.chat_document()), extra=b"x-more: 2\r\n"))
    head, _ = await connection.response()
    assert head.startswith(b"HTTP/1.1 200 ")
    assert engine.received[1].header("x-more") == "2"
    await connection.close()


@pytest.mark.parametrize("path", [b"/v1/models", b"/v1/chat/completions"])
async def test_a_key_in_a_trailer_opens_nothing(cluster: Any, path: bytes) -> None:
    keys = KeyRing([ApiKey("mine", hashlib.sha256(b"k").digest(), "mine")])
    door = await cluster.door([await cluster.engine()], keys=keys)
    connection = await door.connect()
    method = b"GET" if path == b"/v1/models" else b"POST"
    connection.send((CHUNKED % path).replace(b"POST", method) + cluster.chunk(b"{}") + TRAILERS)
    head, _ = await connection.response()
    assert head.startswith(b"HTTP/1.1 401 ")
    await connection.close()


@pytest.mark.parametrize("path", [b"/v1/chat/completions", b"/v1/models"])
@pytest.mark.parametrize("line", [b"x-%06d: y\r\n", b"%07d"], ids=["many fields", "one field"])
async def test_endless_heads_are_refused(cluster: Any, path: bytes, line: bytes) -> None:
    engine = await cluster.engine()
    door = await cluster.door([engine])
    connection = await door.connect()
    connection.send(b"POST %b HTTP/1.1\r\nhost: x\r\nx-long: " % path)
    connection.send(b"".join(line % number for number in range(2_000_000 // len(line))))
    error = refusal(await connection.reader.read(), 431)
    assert error["code"] == "headers_too_large" and "65536 bytes" in error["message"]
    assert not engine.received
    await connection.close()


async def test_the_limit_of_a_head_is_exact(cluster: Any) -> None:
    """Whether it comes alone or together with its body, which does not count."""
    engine = await cluster.engine()
    door = await cluster.door([engine])
    body = orjson.dumps(cluster.chat_document(metadata={"note": "n" * 70_000}))
    sizes = b"/v1/chat/completionshostconductorcontent-length%dx" % len(body)
    for over, status in ((0, b"200"), (1, b"431")):
        connection = await door.connect()
        field = b"x: %b\r\n" % (b"y" * (65_536 - len(sizes) + over))
        connection.send(cluster.post(body, extra=field))
        head = await connection.reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 " + status)
        await connection.close()


async def test_endless_trailers_are_refused(cluster: Any) -> None:
    engine = await cluster.engine()
    door = await cluster.door([engine])
    connection = await door.connect()
    connection.send(CHAT + cluster.chunk(orjson.dumps(cluster.chat_document())) + b"0\r\nx: ")
    connection.send(b"y" * 2_000_000)
    assert refusal(await connection.reader.read(), 431)["code"] == "headers_too_large"
    assert not engine.received
    await connection.close()


READING = APIRouter()


@READING.post("/read")
async def read(request: Request) -> int:
    return len(await request.body())


@pytest.mark.parametrize("path", [b"/v1/chat/completions", b"/read"])
@pytest.mark.parametrize("size_line", [b"zz\r\n", b"-1\r\n", b"2\r\n{}{}\r\n", b"f" * 20 + b"\r\n"])
async def test_a_malformed_chunk_is_refused(cluster: Any, path: bytes, size_line: bytes) -> None:
    engine = await cluster.engine()
    door = await cluster.door([engine], routers=[READING])
    connection = await door.connect()
    connection.send((CHUNKED % path) + cluster.chunk(b'{"model"'))
    await asyncio.sleep(0.05)  # what is sent next arrives apart
    with structlog.testing.capture_logs() as logs:
        connection.send(size_line)
        assert refusal(await connection.reader.read(), 400)["code"] == "invalid_http"
        await asyncio.sleep(0.01)  # the application hears of it
    assert not any(entry["log_level"] == "error" for entry in logs)
    assert not engine.received and not engine.connections
    assert door.sample("conductor_inflight_requests") == 0
    await connection.close()


async def test_a_malformed_chunk_behind_a_request_leaves_its_answer_whole(cluster: Any) -> None:
    engine = await cluster.engine()
    door = await cluster.door([engine])
    connection = await door.connect()
    connection.send(cluster.post(orjson.dumps(cluster.chat_document())) + CHAT + b"zz\r\n")
    head, body = await connection.response()
    assert head.startswith(b"HTTP/1.1 200 ") and b"connection: close" not in head
    assert orjson.loads(body) == cluster.ANSWER
    assert refusal(await connection.reader.read(), 400)["code"] == "invalid_http"
    assert len(engine.received) == 1
    await connection.close()
