"""Thousands of requests, one in twenty of which goes wrong: each is answered once, and nothing stays behind."""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import socket
import struct
from collections import Counter
from pathlib import Path
from typing import Any

import orjson
import pytest

from router.delivery import Delivery
from router.exchange import Exchange
from router.legs import Leg
from router.upstream import UpstreamConnection

REQUESTS = int(os.environ.get("CONDUCTOR_SOAK_REQUESTS", "5000"))
CLIENTS = 32
FAULT_EVERY = 20
TRIED: Counter[str] = Counter()  # attempts by request id
FAULTS = ("reset", "stall", "garbage", "error", "break", "silence", "leave", "leave late")
EVENTS = 4
SETTINGS = {
    "first_byte_timeout_s": 1.0,  # a busy machine may stand still for longer than a third of that
    "stall_timeout_s": 1.0,
    "max_idle_connections": CLIENTS,
    "retry_burst": 2 * CLIENTS,  # at the end of a part, nobody but those that stalled is left
    "log_requests": False,
}


def fault_of(number: int) -> str | None:
    return FAULTS[number // FAULT_EVERY % len(FAULTS)] if number % FAULT_EVERY == 0 else None


class FaultyEngine:
    """Does to a request's first attempt what its id says."""

    def __init__(self, cluster: Any) -> None:
        self.cluster = cluster
        self.engine: Any = None

    async def respond(self, request: Any, writer: asyncio.StreamWriter) -> None:
        self.engine.received.clear()  # what the double remembers must not look like a leak
        number = request.header("x-request-id")
        fault = fault_of(int(number)) if TRIED[number] == 0 else None
        TRIED[number] += 1
        cluster = self.cluster
        if fault in ("stall", "leave"):
            await asyncio.sleep(30)
        elif fault == "reset":
            linger = struct.pack("ii", 1, 0)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            writer.transport.abort()
        elif fault == "garbage":
            writer.write(b"\x16\x03\x01garbage\r\n\r\n")
        elif fault == "error":
            writer.write(b"HTTP/1.1 500 Internal Server Error\r\ncontent-length: 6\r\n\r\nbroken")
        elif not request.document.get("stream"):
            writer.write(cluster.json_response(orjson.dumps(cluster.ANSWER)))
        else:
            writer.write(cluster.STREAM_HEAD)
            for event in range(EVENTS):
                writer.write(cluster.chunk(cluster.event(f"{number}.{event}")))
                if fault == "break":
                    await writer.drain()
                    writer.transport.abort()
                    return
                if fault in ("silence", "leave late"):
                    await asyncio.sleep(30)
                await asyncio.sleep(0)
            writer.write(cluster.chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")


class Client:
    """One of several that share the numbers of the requests; each keeps a connection as long as it can."""

    def __init__(self, cluster: Any, door: Any, numbers: Any) -> None:
        self.cluster, self.door, self.numbers = cluster, door, numbers
        self.outcomes: Counter[str] = Counter()

    async def run(self) -> None:
        connection = await self.door.connect()
        for number in self.numbers:
            fault = fault_of(number)
            streams = number % 2 == 1 or fault in ("break", "silence", "leave late")
            body = orjson.dumps(self.cluster.chat_document(stream=streams))
            connection.send(self.cluster.post(body, extra=b"x-request-id: %d\r\n" % number))
            if fault == "leave":
                await self.cluster.wait_until(lambda number=number: TRIED[str(number)] == 1)
            elif fault == "leave late":
                await connection.reader.readuntil(b"\n\n\r\n")
            if fault in ("leave", "leave late"):
                self.outcomes["left"] += 1
                await connection.close()
                connection = await self.door.connect()
                continue
            head = await connection.reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 ") and b"x-request-id: %d\r\n" % number in head, head
            if streams:
                answer = await connection.reader.readuntil(b"0\r\n\r\n")
                self.outcomes[self._judge_stream(number, answer)] += 1
            else:
                length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                answer = await connection.reader.readexactly(length)
                assert orjson.loads(answer) == self.cluster.ANSWER
                self.outcomes["whole"] += 1
        await connection.close()

    def _judge_stream(self, number: int, answer: bytes) -> str:
        events = [answer.count(b'"%d.%d"' % (number, event)) for event in range(EVENTS)]
        assert answer.count(b"data: [DONE]") <= 1
        if b'"error"' in answer:
            assert fault_of(number) in ("break", "silence") and events == [1, 0, 0, 0], answer
            return "error"
        assert events == [1] * EVENTS and answer.count(b"data: [DONE]") == 1, answer
        return "whole"


def open_sockets() -> int:
    links = (each.readlink() for each in Path("/proc/self/fd").iterdir() if each.is_symlink())
    return sum(link.name.startswith("socket:") for link in links)


def alive() -> list[Any]:
    """Objects of requests that are over should be freed without the collector's help."""
    kinds = (Exchange, Delivery, Leg, UpstreamConnection)
    return [each for each in gc.get_objects() if isinstance(each, kinds)]


@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.timeout(90 + REQUESTS // 50)
async def test_every_request_is_answered_once_and_nothing_is_left_behind(cluster: Any) -> None:
    TRIED.clear()
    others = alive()  # that tests in this process have left
    engines = []
    for name in ("e0", "e1"):
        faulty = FaultyEngine(cluster)
        faulty.engine = await cluster.engine(name, faulty.respond)
        engines.append(faulty.engine)
    door = await cluster.door(engines, **SETTINGS)
    tasks_before, sockets_before = len(asyncio.all_tasks()), open_sockets()
    outcomes: Counter[str] = Counter()
    held: list[int] = []
    per_part = REQUESTS // 5
    for part in range(5):  # equal parts, between which nothing may have been added
        numbers = iter(range(part * per_part, (part + 1) * per_part))
        clients = [Client(cluster, door, numbers) for _ in range(CLIENTS)]
        await asyncio.gather(*(client.run() for client in clients))
        for client in clients:
            outcomes += client.outcomes
        await cluster.wait_until(lambda: not door.services.active and door.placements.open_placements == 0)
        ended = Counter(name for name, _ in door.placements.calls)
        assert ended["place"] == ended["finished"] + ended["cancelled"] + ended["failed"]
        door.placements.calls.clear()
        door.placements.asked.clear()
        TRIED.clear()
        for engine in engines:
            engine.received.clear()
        del clients, client
        gc.collect()
        held.append(len(gc.get_objects()))
    assert outcomes.total() == 5 * per_part
    faults = Counter(fault_of(number) for number in range(5 * per_part))
    assert outcomes["left"] == faults["leave"] + faults["leave late"]
    assert outcomes["error"] == faults["break"] + faults["silence"]
    assert held[-1] - held[1] < 500, held
    pools = door.services.pool._instances.values()

    def only_idle_connections_are_left() -> bool:
        kept = sum(len(pool.open_connections) for pool in pools)
        return kept == sum(len(pool.idle) for pool in pools) == len(alive()) - len(others)

    await cluster.wait_until(only_idle_connections_are_left)
    assert all(len(pool.idle) <= CLIENTS for pool in pools)
    door.services.pool.close()
    await cluster.wait_until(lambda: open_sockets() == sockets_before)
    await cluster.wait_until(lambda: len(asyncio.all_tasks()) == tasks_before)


def test_every_fault_has_its_turn() -> None:
    assert {fault_of(number) for number in itertools.islice(itertools.count(), 5_000)} == {None, *FAULTS}
