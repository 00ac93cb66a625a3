"""What an engine sends is what the client gets: bytes, order and time, whatever the pieces."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

TEXT = st.text(max_size=40)
CHUNKS = st.lists(st.lists(TEXT, min_size=1, max_size=4), min_size=1, max_size=6)  # events in a chunk
CUTS = st.lists(st.integers(0, 4_000), max_size=8)


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    ends = sorted({cut % (len(data) + 1) for cut in cuts} | {len(data)})
    return [data[start:end] for start, end in zip([0, *ends], ends, strict=False) if end > start]


class Script:
    """An engine that sends the given pieces, each on its own as far as a socket keeps them apart."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self.closes = False

    async def respond(self, request: Any, writer: asyncio.StreamWriter) -> None:
        writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for piece in self.pieces:
            writer.write(piece)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        if self.closes:
            await writer.drain()
            writer.close()


@pytest.fixture
async def spliced(cluster: Any) -> tuple[Script, Any]:
    """One for all examples of a test."""
    script = Script()
    return script, await cluster.door([await cluster.engine(respond=script.respond)])


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(chunks=CHUNKS, cuts=CUTS, head_first=st.booleans())
async def test_a_stream_arrives_byte_for_byte(
    cluster: Any, spliced: tuple[Script, Any], chunks: list[list[str]], cuts: list[int], head_first: bool
) -> None:
    script, door = spliced
    body = b"".join(cluster.chunk(b"".join(map(cluster.event, texts))) for texts in chunks)
    body += cluster.chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
    head = cluster.STREAM_HEAD
    script.pieces = pieces(head + body, [*cuts, len(head)] if head_first else cuts)
    connection = await door.connect()
    for _ in range(2):  # the second time on connections that are reused
        connection.send(cluster.post(orjson.dumps(cluster.chat_document(stream=True))))
        head = await connection.reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 ")
        assert await connection.reader.readexactly(len(body)) == body
    await connection.close()


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(size=st.integers(0, 3_000), cuts=CUTS, closes=st.booleans())
async def test_a_body_arrives_byte_for_byte(
    cluster: Any, spliced: tuple[Script, Any], size: int, cuts: list[int], closes: bool
) -> None:
    """With its length, or ended by the end of the connection."""
    script, door = spliced
    body = bytes(number * 7 % 256 for number in range(size))
    framing = b"" if closes else b"content-length: %d\r\n" % size
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/octet-stream\r\n%b\r\n" % framing
    script.pieces, script.closes = pieces(head + body, cuts), closes
    answer = await door.chat()
    assert (answer.status_code, answer.content) == (200, body)


async def test_an_event_is_not_held_until_the_next_one(cluster: Any) -> None:
    """The engine sends an event only when the client has told that it has the one before."""
    arrived = asyncio.Semaphore(0)

    async def respond(request: Any, writer: asyncio.StreamWriter) -> None:
        writer.write(cluster.STREAM_HEAD)
        for number in range(20):
            writer.write(cluster.chunk(cluster.event(f"n{number}.")))
            await arrived.acquire()
        writer.write(cluster.chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")

    door = await cluster.door([await cluster.engine(respond=respond)])
    connection = await door.connect()
    connection.send(cluster.post(orjson.dumps(cluster.chat_document(stream=True))))
    async with asyncio.timeout(10):
        for number in range(20):
            await connection.reader.readuntil(b"n%d." % number)
            arrived.release()
        await connection.reader.readuntil(b"0\r\n\r\n")
    await connection.close()


async def test_no_socket_waits_for_more_to_send(cluster: Any) -> None:
    """Nagle's algorithm and delayed acknowledgements together hold every first event for 40 ms."""

    async def respond(request: Any, writer: asyncio.StreamWriter) -> None:
        writer.write(cluster.STREAM_HEAD + cluster.chunk(cluster.event()))
        await asyncio.sleep(30)

    engine = await cluster.engine(respond=respond)
    door = await cluster.door([engine])
    connection = await door.connect()
    connection.send(cluster.post(orjson.dumps(cluster.chat_document(stream=True))))
    await connection.reader.readuntil(b"\n\n\r\n")
    to_engine = door.services.pool.instance(engine.target).open_connections
    [exchange] = door.services.active
    transports = [exchange.door.transport, *(each.transport for each in to_engine)]
    assert len(transports) == 2
    for transport in transports:
        assert transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    await connection.close()


@pytest.mark.parametrize("reads", [False, True])
async def test_a_client_that_takes_nothing_is_given_up(cluster: Any, reads: bool) -> None:
    """One that reads a little now and then is not."""
    piece = cluster.chunk(cluster.event("x" * 60_000))

    async def respond(request: Any, writer: asyncio.StreamWriter) -> None:
        writer.write(cluster.STREAM_HEAD)
        while True:
            writer.write(piece)
            await writer.drain()

    door = await cluster.door([await cluster.engine(respond=respond)], stall_timeout_s=0.5)
    connection = await door.connect()
    connection.writer.transport.pause_reading()
    connection.send(cluster.post(orjson.dumps(cluster.chat_document(stream=True))))
    await cluster.wait_until(lambda: any(each.door.flow.write_paused for each in door.services.active))
    if reads:
        accepted = connection.writer.get_extra_info("socket")
        for _ in range(20):
            await asyncio.sleep(0.1)
            for _ in range(40):  # more than lies in the kernel's buffers, in all
                await asyncio.get_running_loop().sock_recv(accepted._sock, 65_536)
        assert door.services.active
    else:
        await cluster.wait_until(lambda: not door.services.active)
        assert door.placements.named("cancelled") and not door.placements.named("failed")
    await connection.close()
    await cluster.wait_until(lambda: not door.services.active)


async def test_what_a_slow_client_does_not_read_is_not_kept_here(cluster: Any) -> None:
    """Of 64 MB, no more than the buffer's limit and a piece or two: the rest waits at the engine."""
    piece = cluster.chunk(cluster.event("x" * 60_000))
    written = 0

    async def respond(request: Any, writer: asyncio.StreamWriter) -> None:
        nonlocal written
        writer.write(cluster.STREAM_HEAD)
        while written < 64_000_000:
            writer.write(piece)
            written += len(piece)
            await writer.drain()

    door = await cluster.door([await cluster.engine(respond=respond)], client_buffer_bytes=256 * 1024)
    connection = await door.connect()
    connection.writer.transport.pause_reading()
    connection.send(cluster.post(orjson.dumps(cluster.chat_document(stream=True))))
    await cluster.wait_until(lambda: any(each.door.flow.write_paused for each in door.services.active))
    [exchange] = door.services.active
    before = -1
    while written != before:  # the sockets' own buffers fill up
        before = written
        await asyncio.sleep(0.1)
    assert written < 64_000_000
    assert exchange.door.transport.get_write_buffer_size() < 256 * 1024 + (1 << 20)
    await connection.close()
    await cluster.wait_until(lambda: not door.services.active)
    assert door.placements.named("cancelled")
