"""Writes of one turn of the event loop are made together, each transport's in order."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.outbox import SINGLE_TURNS, Outbox
from router.upstream import InstancePool, UpstreamConnection, UpstreamFailure


class Wire:
    """A transport that keeps what is written."""

    def __init__(self, broken: bool = False) -> None:
        self.written: list[bytes] = []
        self.closed = False
        self.broken = broken

    def write(self, data: bytes) -> None:
        if self.broken:
            raise RuntimeError("no wire")
        self.written.append(bytes(data))

    def writelines(self, pieces: tuple[bytes, ...]) -> None:
        self.write(b"".join(pieces))

    def is_closing(self) -> bool:
        return self.closed

    def abort(self) -> None:
        self.closed = True

    close = abort

    def get_write_buffer_size(self) -> int:
        return 0

    def resume_reading(self) -> None:
        pass

    def get_extra_info(self, name: str) -> None:
        return None


class Receiver:
    def __init__(self) -> None:
        self.calls: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: self.calls.append((name, *arguments))


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.binary(min_size=1, max_size=3), st.sampled_from([True, True, False])),
        max_size=60,
    )
    | st.lists(st.tuples(st.integers(0, 2), st.binary(min_size=1, max_size=3), st.just(True)), min_size=20)
)
def test_each_transport_gets_its_bytes_in_order(steps: list[tuple[int, bytes, bool]]) -> None:
    async def write_all() -> list[list[bytes]]:
        outbox, wires = Outbox(), [Wire(), Wire(), Wire()]
        for to, data, turn_ends in steps:
            outbox.write(wires[to], data)  # type: ignore[arg-type]
            if turn_ends:
                await asyncio.sleep(0)
        await asyncio.sleep(0)
        return [wire.written for wire in wires]

    written = asyncio.run(write_all())
    assert written == [[data for to, data, _ in steps if to == number] for number in range(3)]


async def test_while_turns_have_one_write_each_it_is_made_at_once() -> None:
    outbox, wire = Outbox(), Wire()
    for number in range(SINGLE_TURNS):
        outbox.write(wire, b"%d" % number)  # type: ignore[arg-type]
        assert len(wire.written) == number
        await asyncio.sleep(0)
    turn = outbox.turn
    outbox.write(wire, b"at once")  # type: ignore[arg-type]
    assert wire.written[-1] == b"at once" and outbox.turn > turn
    outbox.write(wire, b"second")  # type: ignore[arg-type]
    assert wire.written[-1] == b"at once"
    await asyncio.sleep(0)
    assert wire.written[-1] == b"second"
    outbox.write(wire, b"later")  # type: ignore[arg-type]
    assert wire.written[-1] == b"second"  # the turn before had two
    await asyncio.sleep(0)
    assert wire.written[-1] == b"later"


async def test_nothing_is_written_before_the_turn_ends() -> None:
    outbox, wire = Outbox(), Wire()
    outbox.write(wire, b"one")  # type: ignore[arg-type]
    assert not wire.written
    await asyncio.sleep(0)
    assert wire.written == [b"one"]


@pytest.mark.parametrize("pieces", [[b"x"] * 100, [b"x" * 1_000_000]])
async def test_little_waits(pieces: list[bytes]) -> None:
    outbox, wire = Outbox(), Wire()
    for piece in pieces:
        outbox.write(wire, piece)  # type: ignore[arg-type]
    assert sum(map(len, pieces)) - sum(map(len, wire.written)) < 100


async def test_what_is_written_along_follows() -> None:
    outbox, wire = Outbox(), Wire()
    outbox.write(wire, b"before")  # type: ignore[arg-type]
    outbox.write_both(wire, b"head", bytearray(b"body"))  # type: ignore[arg-type]
    assert wire.written == [b"before", b"headbody"]


async def test_a_transport_that_fails_costs_no_other_its_bytes() -> None:
    outbox, closed, broken, wire = Outbox(), Wire(), Wire(broken=True), Wire()
    for to in (closed, broken, wire):
        outbox.write(to, b"one")  # type: ignore[arg-type]
    closed.closed = True
    outbox.flush()
    assert (closed.written, wire.written) == ([], [b"one"])


def connected(outbox: Outbox) -> tuple[UpstreamConnection, Wire]:
    wire = Wire()
    connection = UpstreamConnection(InstancePool(outbox, max_idle=8, clock=time.monotonic))
    connection.connection_made(wire)  # type: ignore[arg-type]
    return connection, wire


TOO_LATE = b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\n\r\n"


async def test_what_an_idle_engine_says_answers_no_request_that_is_still_unwritten() -> None:
    outbox = Outbox()
    connection, wire = connected(outbox)
    connection.pool.release(connection)
    assert connection.pool.idle.pop() is connection
    receiver: Any = Receiver()
    connection.send(receiver, b"head", b"body")
    connection.data_received(TOO_LATE)
    outbox.flush()
    [(name, failure)] = receiver.calls
    assert name == "response_failed" and isinstance(failure, UpstreamFailure) and failure.stale
    assert wire.closed and not wire.written and not connection.pool.idle


async def test_an_engine_may_refuse_a_connection_with_a_response() -> None:
    outbox = Outbox()
    connection, wire = connected(outbox)
    receiver: Any = Receiver()
    connection.send(receiver, b"head", b"body")
    connection.data_received(TOO_LATE)
    assert [call[0] for call in receiver.calls] == ["response_whole"]
    assert wire.written == [b"headbody"]
