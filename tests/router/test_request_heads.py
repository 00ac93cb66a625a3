"""Requests whose heads say more than most: targets in other forms, offers of other protocols."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
import pytest

OFFER = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAEAAEAA\r\n"


@pytest.mark.parametrize("pieces", [1, 7])
async def test_offers_of_http_2_are_answered_as_if_not_made(cluster: Any, pieces: int) -> None:
    """Java's HTTP client makes one with the first request of a connection."""
    engine = await cluster.engine()
    door = await cluster.door([engine])
    body = orjson.dumps(cluster.chat_document())
    requests = [
        cluster.post(body, extra=OFFER),
        b"GET /v1/models HTTP/1.1\r\nhost: x\r\n" + OFFER + b"\r\n",
        cluster.post(body, extra=OFFER).replace(b"\r\nconnection: Upgrade", b"\r\nConnection: upgrade"),
        cluster.post(body),
    ]
    chunked = OFFER + b"transfer-encoding: chunked\r\n\r\n" + cluster.chunk(body) + b"0\r\n\r\n"
    requests.append(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n" + chunked)
    connection = await door.connect()
    sent = b"".join(requests)
    size = -(-len(sent) // pieces)
    for start in range(0, len(sent), size):
        connection.send(sent[start : start + size])
        await asyncio.sleep(0.005)
    answers = [orjson.loads((await connection.response())[1]) for _ in requests]
    assert [answer.get("object") for answer in answers] == [
        "chat.completion",
        "list",
        "chat.completion",
        "chat.completion",
        "chat.completion",
    ]
    assert [received.body for received in engine.received] == [body] * 4
    assert all(received.header("upgrade") is None for received in engine.received)
    assert all(received.header("http2-settings") is None for received in engine.received[:2])
    await connection.close()


async def test_many_offers_on_one_connection_do_not_recurse(cluster: Any) -> None:
    door = await cluster.door([await cluster.engine()])
    connection = await door.connect()
    connection.send(cluster.post(b"{}", extra=b"connection: upgrade\r\nupgrade: x\r\n") * 2_000)
    for _ in range(2_000):
        assert (await connection.response())[0].startswith(b"HTTP/1.1 400 ")
    await connection.close()


@pytest.mark.parametrize(
    ("target", "forwarded"),
    [
        ("http://conductor:8000/v1/chat/completions", "/v1/chat/completions"),
        ("http://conductor/v1/chat/completions?a=%20b", "/v1/chat/completions?a=%20b"),
        ("/v1/%63hat%2Fcompletions?a=%20b", "/v1/chat/completions?a=%20b"),
        ("/v1/chat/completions?a#b", "/v1/chat/completions?a"),
    ],
)
async def test_targets_in_other_forms(cluster: Any, target: str, forwarded: str) -> None:
    engine = await cluster.engine()
    door = await cluster.door([engine])
    connection = await door.connect()
    connection.send(cluster.post(orjson.dumps(cluster.chat_document()), target))
    assert (await connection.response())[0].startswith(b"HTTP/1.1 200 ")
    assert engine.received[0].request_line == f"POST {forwarded} HTTP/1.1"
    connection.send(b"GET http://conductor/v1/models HTTP/1.1\r\nhost: x\r\n\r\n")
    assert orjson.loads((await connection.response())[1])["object"] == "list"
    await connection.close()


@pytest.mark.parametrize("target", ["/v1/chat/completions%0d%0ax: y", "/v1/chat/completions%3Fa", "*"])
async def test_targets_that_only_look_alike_are_not_forwarded(cluster: Any, target: str) -> None:
    engine = await cluster.engine()
    door = await cluster.door([engine])
    connection = await door.connect()
    connection.send(cluster.post(orjson.dumps(cluster.chat_document()), target.replace(" ", "%20")))
    assert (await connection.response())[0][9:12] in (b"400", b"404")
    assert not engine.received
    await connection.close()
