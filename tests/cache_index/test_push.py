"""Events pushed over real HTTP."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import numpy as np
import pytest
import uvicorn
from fastapi import FastAPI

from cache_index import CacheIndex, Holder, Namespace, Tier, sequence_hashes
from cache_index.push import MAX_EVENTS, make_push_router
from cache_index.push_ingest import PushIngest

BLOCK = 4
NAMESPACE = Namespace("tiny", BLOCK)
STORE = Holder("store")


class Service:
    """The route under a real server."""

    def __init__(self) -> None:
        self.index = CacheIndex()
        self.ingest = PushIngest(self.index, time.monotonic)
        app = FastAPI()
        app.include_router(make_push_router(self.ingest))
        self._listener = socket.socket()
        self._listener.bind(("127.0.0.1", 0))
        self._server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off"))
        port = self._listener.getsockname()[1]
        self.client = httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False)
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._task = asyncio.create_task(self._server.serve(sockets=[self._listener]))
        while not self._server.started:
            await asyncio.sleep(0.005)

    async def stop(self) -> None:
        await self.client.aclose()
        self._server.should_exit = True
        assert self._task is not None
        await self._task

    async def push(self, body: Any) -> tuple[int, dict[str, Any]]:
        response = await self.client.post("/v1/events", json=body)
        return response.status_code, response.json()

    def blocks(
        self, tokens: list[int], holder: Holder = STORE, tier: Tier = Tier.HOST, salt: str | None = None
    ) -> int:
        row = self.index.holder_id(holder)
        assert row is not None
        hashes = sequence_hashes(np.array(tokens, np.uint32), BLOCK, cache_salt=salt)
        return int(self.index.match(NAMESPACE, hashes)[row, tier])

    def state(self, holder: Holder = STORE) -> str:
        return next(each.state for each in self.ingest.stream_stats() if each.holder == holder)


@pytest.fixture
async def service() -> AsyncIterator[Service]:
    made = Service()
    await made.start()
    yield made
    await made.stop()


def event(event_id: int, event_type: str = "stored", **fields: Any) -> dict[str, Any]:
    return {
        "event_id": event_id,
        "timestamp": 1000 + event_id,
        "event_type": event_type,
        "model_name": "tiny",
        "block_size": BLOCK,
        "backend_id": "store",
        "medium": "cpu",
        **fields,
    }


def stored(event_id: int, names: list[int], tokens: list[int], **fields: Any) -> dict[str, Any]:
    return event(event_id, seq_hashes=names, token_ids=tokens, **fields)


TOKENS = list(range(12))


async def test_a_chain_is_stored_extended_and_removed(service: Service) -> None:
    status, answer = await service.push(stored(1, [11, 12], TOKENS[:8], base_block_idx=0))
    assert (status, answer) == (200, {"applied": 1, "duplicates": 0, "gaps": [], "rejected": []})
    await service.push(stored(2, [13], TOKENS[8:], parent_hash=12, base_block_idx=2))
    assert service.blocks(TOKENS) == 3
    assert service.blocks(TOKENS, tier=Tier.DEVICE) == 0
    await service.push(event(3, "removed", seq_hashes=[12]))
    assert service.blocks(TOKENS) == 1
    assert service.state() == "warm"


async def test_without_tokens_the_hashes_are_the_recommended_ones(service: Service) -> None:
    hashes = sequence_hashes(np.array(TOKENS, np.uint32), BLOCK).tolist()
    signed = [value - 2**64 if value >= 2**63 else value for value in hashes]
    await service.push(event(1, seq_hashes=signed[:2]))
    await service.push(event(2, seq_hashes=signed[2:], parent_hash=signed[1], base_block_idx=2))
    assert service.blocks(TOKENS) == 3
    await service.push(event(3, "removed", seq_hashes=signed[:1]))
    assert service.blocks(TOKENS) == 0


async def test_salt_adapter_and_tenant_separate(service: Service) -> None:
    await service.push(
        [
            stored(1, [1], TOKENS[:4], additional_salt="s"),
            stored(2, [2], TOKENS[:4], lora_name="a"),
            stored(3, [3], TOKENS[:4], tenant_id="t"),
        ]
    )
    assert service.blocks(TOKENS) == 0
    assert service.blocks(TOKENS, salt="s") == 1


async def test_ranks_are_holders_of_their_own(service: Service) -> None:
    await service.push([stored(1, [1], TOKENS[:4], dp_rank=0), stored(1, [1], TOKENS[:4], dp_rank=3)])
    assert service.blocks(TOKENS, Holder("store", 3)) == 1
    assert {each.holder for each in service.ingest.stream_stats()} == {STORE, Holder("store", 3)}


async def test_known_events_are_ignored(service: Service) -> None:
    first = stored(1, [1], TOKENS[:4])
    await service.push([first, event(2, "removed", seq_hashes=[1])])
    status, answer = await service.push(
        [first, event(2, "removed", seq_hashes=[1]), stored(3, [2], TOKENS[4:8])]
    )
    assert (status, answer["applied"], answer["duplicates"]) == (200, 1, 2)
    assert service.blocks(TOKENS) == 0


async def test_a_gap_is_reported_and_voids_what_was_told(service: Service) -> None:
    await service.push(stored(1, [1], TOKENS[:4]))
    _, answer = await service.push(stored(4, [5], TOKENS[4:8]))
    assert answer["gaps"] == [{"backend_id": "store", "dp_rank": 0, "expected": 2, "received": 4}]
    assert answer["applied"] == 1
    assert (service.blocks(TOKENS), service.blocks(TOKENS[4:8])) == (0, 1)
    assert service.state() == "cold"


async def test_a_publisher_that_begins_anew_is_believed(service: Service) -> None:
    await service.push([stored(1, [1], TOKENS[:4]), stored(2, [2], TOKENS[4:8])])
    await service.push(stored(1, [3], TOKENS[8:], timestamp=5000))
    assert (service.blocks(TOKENS[:4]), service.blocks(TOKENS[8:])) == (0, 1)
    assert service.state() == "warm"


async def test_a_late_first_event_is_cold(service: Service) -> None:
    await service.push(stored(17, [1], TOKENS[:4]))
    assert service.state() == "cold"


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"event_id": -1}, "event_id"),
        ({"event_id": "soon"}, "event_id"),
        ({"model_name": ""}, "model_name"),
        ({"model_name": None}, "model_name"),
        ({"block_size": 0}, "block_size"),
        ({"backend_id": None}, "backend_id"),
        ({"medium": "papyrus"}, "medium"),
        ({"seq_hashes": []}, "seq_hashes"),
        ({"seq_hashes": [1, "x"]}, "seq_hashes.1"),
        ({"seq_hashes": [2**64]}, "seq_hashes.0"),
        ({"token_ids": [1, 2, 3, -4]}, "token_ids.3"),
        ({"token_ids": [1, 2, 3]}, "token_ids"),
        ({"base_block_idx": 3}, "parent_hash"),
        ({"dp_rank": -1}, "dp_rank"),
        ({"event_type": "moved"}, "event_type"),
        ({"event_type": None}, "event_type"),
    ],
)
async def test_a_broken_event_names_its_field_and_loses_nothing_else(
    service: Service, change: dict[str, Any], field: str
) -> None:
    broken = {**stored(2, [9], TOKENS[:4]), **change}
    status, answer = await service.push({**stored(2, [9], TOKENS[:4], backend_id="other"), **change})
    assert status == 422
    assert [each["field"] for each in answer["rejected"]] == [field]

    good = [stored(1, [1], TOKENS[:4]), broken, stored(3, [2], TOKENS[4:8], parent_hash=1)]
    status, answer = await service.push(good)
    assert status == 207
    assert [(each["index"], each["field"]) for each in answer["rejected"]] == [(1, field)]
    assert (answer["applied"], answer["gaps"]) == (2, [])
    assert service.blocks(TOKENS[:8]) == 2


@pytest.mark.parametrize("body", [b"{", b"\xff", b"7", b"[7]", b'"text"'])
async def test_a_body_that_is_no_event(service: Service, body: bytes) -> None:
    response = await service.client.post("/v1/events", content=body)
    assert response.status_code == 422
    assert response.json()["rejected"][0]["reason"]


async def test_a_body_of_too_many_events_is_refused(service: Service) -> None:
    status, answer = await service.push([1] * (MAX_EVENTS + 1))
    assert (status, answer["rejected"][0]["field"]) == (422, "body")


async def test_an_empty_list_is_fine(service: Service) -> None:
    assert await service.push([]) == (200, {"applied": 0, "duplicates": 0, "gaps": [], "rejected": []})


async def test_cleared_drops_one_medium_or_all_that_was_told(service: Service) -> None:
    await service.push([stored(1, [1], TOKENS[:4]), stored(2, [1], TOKENS[:4], medium="disk")])
    service.index.store(STORE, Tier.DEVICE, NAMESPACE, sequence_hashes(np.arange(4, dtype=np.uint32), BLOCK))
    await service.push(event(3, "cleared", seq_hashes=None))
    assert {tier for _, tier in service.index.residencies(STORE)} == {Tier.DEVICE, Tier.DISK}
    await service.push(event(4, "cleared", medium=None))
    assert {tier for _, tier in service.index.residencies(STORE)} == {Tier.DEVICE}  # not told by this stream


async def test_an_unknown_parent_is_counted_and_never_a_root(service: Service) -> None:
    await service.push([stored(1, [1], TOKENS[:4]), stored(2, [7], TOKENS[:4], parent_hash=99)])
    assert service.ingest.stream_stats()[0].unresolved_blocks == 1
    assert service.index.stats().blocks == 1


async def test_a_forgotten_publisher_leaves_nothing(service: Service) -> None:
    await service.push(stored(1, [1], TOKENS[:4]))
    service.ingest.forget(STORE)
    assert service.blocks(TOKENS) == 0
    assert service.ingest.stream_stats() == []


def test_statistics_do_not_wait_for_events_that_are_being_applied() -> None:
    ingest = PushIngest(CacheIndex(), time.monotonic)
    asking = threading.Thread(target=ingest.stream_stats)
    with ingest.lock:
        asking.start()
        asking.join(10)
        waited = asking.is_alive()
    asking.join()
    assert not waited
