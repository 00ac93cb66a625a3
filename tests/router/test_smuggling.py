"""Requests whose end two parsers could see at different places: refused, and nothing of them reaches an engine."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

CHAT = b'{"model":"test/model","messages":[{"role":"user","content":"hidden"}]}'
HIDDEN = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(CHAT), CHAT)
LENGTH = b"content-length: %d\r\n" % len(HIDDEN)
CHUNKED = b"transfer-encoding: chunked\r\n"

AMBIGUOUS = {
    "length and chunks": b"content-length: 5\r\n" + CHUNKED + b"\r\n0\r\n\r\n" + HIDDEN,
    "chunks and length": CHUNKED + b"content-length: 5\r\n\r\n0\r\n\r\n" + HIDDEN,
    "two lengths": b"content-length: 0\r\n" + LENGTH + b"\r\n" + HIDDEN,
    "two lengths, the same": LENGTH + LENGTH + b"\r\n" + HIDDEN,
    "a list of lengths": b"content-length: %d, 0\r\n\r\n" % len(HIDDEN) + HIDDEN,
    "a length with a plus": b"content-length: +%d\r\n\r\n" % len(HIDDEN) + HIDDEN,
    "a hexadecimal length": b"content-length: 0x%x\r\n\r\n" % len(HIDDEN) + HIDDEN,
    "a negative length": b"content-length: -1\r\n\r\n" + HIDDEN,
    "a length beyond 64 bits": b"content-length: 18446744073709551617\r\n\r\n" + HIDDEN,
    "an empty length": b"content-length:\r\n\r\n" + HIDDEN,
    "a length with a space inside": b"content-length: 1 2\r\n\r\n" + HIDDEN,
    "a folded length": b"content-length: 0\r\n %d\r\n\r\n" % len(HIDDEN) + HIDDEN,
    "a folded encoding": b"transfer-encoding:\r\n chunked\r\n\r\n0\r\n\r\n" + HIDDEN,
    "a folded field": b"x-more: a\r\n\tb\r\n" + LENGTH + b"\r\n" + HIDDEN,
    "lines that end in LF": b"content-length: 0\n\n" + HIDDEN,
    "a bare LF inside a head": b"x-more: a\ncontent-length: 0\r\n" + LENGTH + b"\r\n" + HIDDEN,
    "a bare CR inside a value": b"x-more: a\rcontent-length: 0\r\n" + LENGTH + b"\r\n" + HIDDEN,
    "a space before the colon of a length": b"content-length : 0\r\n\r\n" + HIDDEN,
    "a space before the colon of an encoding": b"transfer-encoding : chunked\r\n\r\n0\r\n\r\n" + HIDDEN,
    "a space before a name": b" content-length: 0\r\n\r\n" + HIDDEN,
    "no colon": b"content-length 0\r\n\r\n" + HIDDEN,
    "NUL in a value": b"x-more: a\0b\r\n" + LENGTH + b"\r\n" + HIDDEN,
    "chunked, identity": b"transfer-encoding: chunked, identity\r\n\r\n0\r\n\r\n" + HIDDEN,
    "chunked twice": b"transfer-encoding: chunked, chunked\r\n\r\n0\r\n\r\n" + HIDDEN,
    "chunked twice, apart": CHUNKED + CHUNKED + b"\r\n0\r\n\r\n" + HIDDEN,
    "identity": b"transfer-encoding: identity\r\n" + LENGTH + b"\r\n" + HIDDEN,
    "an encoding that nobody knows": b"transfer-encoding: xchunked\r\n\r\n0\r\n\r\n" + HIDDEN,
    "a compressed body": b"transfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n" + HIDDEN,
    "a chunk size beyond 64 bits": CHUNKED + b"\r\n10000000000000002\r\n{}\r\n0\r\n\r\n" + HIDDEN,
    "a chunk size with 0x": CHUNKED + b"\r\n0x2\r\n{}\r\n0\r\n\r\n" + HIDDEN,
    "a chunk size with a plus": CHUNKED + b"\r\n+2\r\n{}\r\n0\r\n\r\n" + HIDDEN,
    "a chunk size with a space before it": CHUNKED + b"\r\n 2\r\n{}\r\n0\r\n\r\n" + HIDDEN,
    "a chunk size line that ends in LF": CHUNKED + b"\r\n2\n{}\r\n0\r\n\r\n" + HIDDEN,
    "LF in a chunk extension": CHUNKED + b"\r\n2;a\nb\r\n{}\r\n0\r\n\r\n" + HIDDEN,
    "a chunk that is longer than it says": CHUNKED + b"\r\n1\r\n{}\r\n0\r\n\r\n" + HIDDEN,
    "no chunk size": CHUNKED + b"\r\n\r\n{}\r\n0\r\n\r\n" + HIDDEN,
}


async def test_what_is_hidden_would_reach_an_engine(cluster: Any) -> None:
    engine = await cluster.engine()
    door = await cluster.door([engine])
    connection = await door.connect()
    connection.send(HIDDEN)
    head, _ = await connection.response()
    assert head.startswith(b"HTTP/1.1 200 ") and len(engine.received) == 1
    await connection.close()


@pytest.mark.parametrize("request_tail", AMBIGUOUS.values(), ids=AMBIGUOUS.keys())
async def test_ambiguous_requests_are_refused(cluster: Any, request_tail: bytes) -> None:
    engine = await cluster.engine()
    door = await cluster.door([engine])
    for path in (b"/v1/chat/completions", b"/v1/models"):
        connection = await door.connect()
        connection.send(b"POST %b HTTP/1.1\r\nhost: x\r\n%b" % (path, request_tail))
        received = await connection.reader.read()  # up to the end: the connection is closed
        head, _, body = received.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400 "), received
        assert b"connection: close" in head.lower() and body.count(b"HTTP/1.1") == 0, received
        assert orjson.loads(body)["error"]["type"] == "invalid_request_error"
        await connection.close()
    assert not engine.received and not engine.connections and not door.placements.asked
