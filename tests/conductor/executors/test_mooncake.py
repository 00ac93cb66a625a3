"""The Mooncake executor against answers as its master gave them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import httpx
import numpy as np
import orjson
import pytest
from tier_actions import host, order

from cache_index import Holder, Namespace, Tier
from cache_index.hashing import Hashes
from conductor.actions import ActionKind, ExecutionError, Place, Prefix
from conductor.executors import MooncakeExecutor, MooncakeStore, segment_holder

POOL = Place(Holder("pool"), Tier.REMOTE)
PREFIX = Prefix(Namespace("m", 16), np.arange(1, 9, dtype=np.uint64))
MEMORY = [{"size_": 4096, "transport_endpoint_": "10.0.0.1:1"}]


def segment(name: str) -> Place:
    return Place(segment_holder("pool", name), Tier.HOST)


def named_up_to(last: int) -> Any:
    def names(holder: Holder, namespace: Namespace, hashes: Hashes) -> list[int | None]:
        return [name if name <= last else None for name in hashes.tolist()]

    return names


class Master:
    """Holds some objects on disk until they are asked for, others in memory."""

    def __init__(self, memory: set[int], disk: set[int] | None = None) -> None:
        self.memory, self.disk = set(memory), disk or set()
        self.asked: list[str] = []
        self.drain = ["CREATED", "RUNNING", "SUCCEEDED"]
        self.blocked = 0

    def __call__(self, request: httpx.Request) -> httpx.Response:
        path, params = request.url.path, request.url.params
        self.asked.append(f"{request.method} {path}")
        if path == "/batch_query_keys":
            known = {key: self._described(int(key, 0)) for key in params["keys"].split(",")}
            return httpx.Response(200, json={"success": True, "data": known})
        if path == "/query_key":
            self.disk.discard(int(params["key"], 0))
            self.memory.add(int(params["key"], 0))
            return httpx.Response(200, json={"success": True, "data": MEMORY})
        if path == "/api/v1/drain_jobs":
            assert orjson.loads(request.content)["segments"] == ["node-1:1"]
            return httpx.Response(200, json={"success": True, "job_id": "1-2", "status": "CREATED"})
        assert params["job_id"] == "1-2"
        state = self.drain.pop(0) if len(self.drain) > 1 else self.drain[0]
        units = {"succeeded_units": 2, "active_units": 0, "blocked_units": self.blocked}
        return httpx.Response(200, json={"success": True, "status_name": state, "message": "so", **units})

    def _described(self, name: int) -> dict[str, Any]:
        if name not in self.memory | self.disk:
            return {"ok": False, "error": "OBJECT_NOT_FOUND", "values": None}
        return {"ok": True, "error": None, "values": MEMORY if name in self.memory else None}

    def executor(self, last_named: int = 100, copies: Any = None) -> MooncakeExecutor:
        client = httpx.AsyncClient(transport=httpx.MockTransport(self))
        return MooncakeExecutor(
            client, {"pool": MooncakeStore("http://master:9003", copies=copies)}, named_up_to(last_named)
        )


class Copies:
    """The store's library, as far as it is used: it takes copies on one after the other."""

    def __init__(self) -> None:
        self.ordered: list[tuple[list[str], str | None, str]] = []
        self.begun, self.stopped = threading.Event(), threading.Event()

    def carry_out(self, keys: Sequence[str], source: str | None, target: str, stop: threading.Event) -> int:
        self.ordered.append((list(keys), source, target))
        if target == "stuck:1":
            self.begun.set()
            stop.wait(20)
            self.stopped.set()
        return len(keys)


@pytest.mark.parametrize(
    ("kind", "source", "target", "able"),
    [
        (ActionKind.PREFETCH, POOL, POOL, True),
        (ActionKind.PROMOTE, None, POOL, True),
        (ActionKind.PREFETCH, host("p0"), POOL, False),
        (ActionKind.PREFETCH, POOL, host("p0"), False),
        (ActionKind.REPLICATE, POOL, segment("node-1:1"), True),
        (ActionKind.MOVE, POOL, segment("node-1:1"), False),  # from which node?
        (ActionKind.MOVE, segment("node-0:1"), segment("node-1:1"), True),
        (ActionKind.REPLICATE, POOL, POOL, False),
        (ActionKind.EVICT, None, segment("node-1:1"), True),
        (ActionKind.EVICT, None, POOL, False),
        (ActionKind.PIN, None, POOL, False),
    ],
)
def test_what_it_can(kind: ActionKind, source: Place | None, target: Place, able: bool) -> None:
    assert Master(set()).executor(copies=Copies()).can(kind, source, target) is able


def test_without_the_library_it_copies_nothing() -> None:
    assert not Master(set()).executor().can(ActionKind.REPLICATE, POOL, segment("node-1:1"))


async def test_asking_for_a_key_brings_it_into_memory() -> None:
    master = Master({1, 2}, {3, 4, 6})
    assert await master.executor().execute(order(ActionKind.PREFETCH, PREFIX, POOL)) == 4  # there is no fifth
    assert master.asked.count("GET /query_key") == 2
    assert master.disk == {6}


async def test_blocks_that_nobody_named_end_the_prefix() -> None:
    master = Master(set(range(1, 9)))
    action = order(ActionKind.PREFETCH, PREFIX, POOL, start=1)
    assert await master.executor(3).execute(action) == 2


async def test_copies_of_what_is_in_memory() -> None:
    copies = Copies()
    executor = Master({1, 2}, {3}).executor(copies=copies)
    copy = order(ActionKind.REPLICATE, PREFIX, segment("node-1:1"), source=POOL)
    move = order(ActionKind.MOVE, PREFIX, segment("node-1:1"), source=segment("node-0:1"), stop=1)
    assert (await executor.execute(copy), await executor.execute(move)) == (2, 1)
    assert copies.ordered == [
        ([f"0x{1:016x}", f"0x{2:016x}"], None, "node-1:1"),
        ([f"0x{1:016x}"], "node-0:1", "node-1:1"),
    ]


async def test_cancelling_stops_the_copies() -> None:
    copies = Copies()
    executor = Master({1, 2}).executor(copies=copies)
    copying = asyncio.create_task(
        executor.execute(order(ActionKind.REPLICATE, PREFIX, segment("stuck:1"), source=POOL))
    )
    await asyncio.to_thread(copies.begun.wait, 20)
    copying.cancel()
    with pytest.raises(asyncio.CancelledError):
        await copying
    assert await asyncio.to_thread(copies.stopped.wait, 20)


async def test_draining_a_node() -> None:
    master = Master(set())
    await master.executor().execute(order(ActionKind.EVICT, None, segment("node-1:1")))
    assert master.asked[-1] == "GET /api/v1/drain_jobs/query"
    failing = Master(set())
    failing.drain = ["FAILED"]
    with pytest.raises(ExecutionError, match="FAILED: so"):
        await failing.executor().execute(order(ActionKind.EVICT, None, segment("node-1:1")))
    with pytest.raises(ExecutionError, match="whole segments"):
        await master.executor().execute(order(ActionKind.EVICT, PREFIX, segment("node-1:1")))


async def test_a_cancelled_drain_is_cancelled_at_the_master() -> None:
    master = Master(set())
    master.drain = ["RUNNING"]
    draining = asyncio.create_task(
        master.executor().execute(order(ActionKind.EVICT, None, segment("node-1:1")))
    )
    while "GET /api/v1/drain_jobs/query" not in master.asked:
        await asyncio.sleep(0.005)
    draining.cancel()
    with pytest.raises(asyncio.CancelledError):
        await draining
    assert master.asked[-1] == "POST /api/v1/drain_jobs/cancel"
