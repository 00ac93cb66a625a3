"""Picks over HTTP: where a request should go, what it holds there, and until when."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx
import orjson
import pytest
from cluster_factory import make_scheduler

from conductor.admission import WaitingRoom
from conductor.dispatcher import Dispatcher
from conductor.placement import Target, Usage
from router import FrontDoorServer, PromptTokenizer, RouterServices, RouterSettings, create_app
from router.addresses import Addresses
from router.inference import Endpoint, parse_inference
from router.picking import GatewayRequest, pick
from router.tokens import TokenService
from simulator.emulator.tokens import TOKENIZER_FOLDER

BODY: dict[str, Any] = {"model": "llama", "prompt": list(range(1024)), "max_tokens": 4}
PATH = "/pick/v1/completions"


class Door:
    """A front door before a scheduler."""

    def __init__(self, roles: str = "mmm", room: WaitingRoom | None = None, **options: Any) -> None:
        self.scheduler = make_scheduler(roles, **options)
        self.services = RouterServices(
            self.scheduler,
            dispatch=Dispatcher(self.scheduler, room, deadline_s=0.2),
            settings=RouterSettings(max_body_bytes=50_000),
        )
        self.server = FrontDoorServer(create_app(self.services), self.services, port=0)
        self.http = httpx.AsyncClient(trust_env=False, timeout=20)

    async def __aenter__(self) -> Door:
        await self.server.start()
        self.http.base_url = httpx.URL(self.server.url)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.http.aclose()
        await self.server.stop()

    def metric(self, name: str, **labels: str) -> float | None:
        return self.services.metrics.registry.get_sample_value(name, labels)


@pytest.fixture
async def door() -> AsyncIterator[Door]:
    async with Door() as door:
        yield door


async def until_over(door: Door) -> None:
    async with asyncio.timeout(20):
        while door.scheduler.active_placements:
            await asyncio.sleep(0.01)
    door.scheduler.check_invariants()


async def test_the_answer_names_the_engine_in_header_and_body(door: Door) -> None:
    answer = await door.http.post(PATH, json=BODY)
    assert answer.status_code == 200
    told = answer.json()
    assert (told["host"], told["port"]) == (answer.headers["x-conductor-host"], 8000)
    assert answer.headers["x-conductor-port"] == "8000"
    assert told["placement_id"] == answer.headers["x-conductor-placement-id"]
    assert door.scheduler.active_placements == 1
    assert 0 < told["ends_in_s"] < 5
    await until_over(door)
    assert door.metric("conductor_picks_ended_total", how="predicted") == 1
    assert door.metric("conductor_picks_total", gateway="http", endpoint="/v1/completions", code="200") == 1
    assert (
        door.metric("conductor_requests_total", model="llama", endpoint="/v1/completions", code="200") is None
    )


@pytest.mark.parametrize(
    "content", ["one chat", "much new text " * 15_000, [{"type": "text", "text": "in parts"}]]
)
async def test_chats_are_placed_by_their_exact_tokens(content: object) -> None:
    tokenizer = PromptTokenizer.from_folder(TOKENIZER_FOLDER)
    scheduler = make_scheduler("mm")
    services = RouterServices(scheduler, tokens=TokenService({"*": tokenizer}))
    body = orjson.dumps({"model": "llama", "messages": [{"role": "user", "content": content}]})
    given = GatewayRequest(b"/v1/chat/completions", {}, body, services.clock())
    asked = (await pick(services, given)).asked
    exact = tokenizer.tokens(parse_inference(Endpoint.CHAT, body))
    assert (asked.token_source, asked.tokens.tolist()) == ("local", exact.tolist())
    services.picks.close()
    services.tokens.close()


async def test_whoever_may_send_requests_does_not_learn_the_engines_keys(door: Door) -> None:
    for instance in door.scheduler.cluster:
        for rank in instance.ranks:
            rank.target = replace(rank.target, api_key="secret-of-the-engine")
    answer = await door.http.post(PATH, json=BODY)
    assert answer.status_code == 200
    assert "secret-of-the-engine" not in answer.text + str(answer.headers)


async def test_a_pick_that_is_told_of_ends_then(door: Door) -> None:
    answer = await door.http.post(PATH, json={**BODY, "max_tokens": 100_000})
    placement_id = answer.json()["placement_id"]
    door.scheduler.finished(placement_id, door.services.clock(), Usage())  # as the REST API does
    assert door.scheduler.active_placements == 0


async def test_the_end_of_the_service_gives_everything_back(door: Door) -> None:
    await door.http.post(PATH, json={**BODY, "max_tokens": 100_000})
    door.services.picks.close()
    assert door.scheduler.active_placements == 0
    assert door.metric("conductor_picks_ended_total", how="cancelled") == 1


async def test_prefill_and_decode_apart() -> None:
    async with Door("pd") as door:
        answer = await door.http.post(PATH, json=BODY)
        assert answer.headers["x-conductor-host"] == "10.0.0.1"
        assert answer.headers["x-conductor-set-x-prefiller-host-port"] == "10.0.0.0:8000"
        assert answer.json()["request_headers"] == {"x-prefiller-host-port": "10.0.0.0:8000"}
        answer = await door.http.post("/pick/v1/embeddings", json={"model": "llama", "input": "x"})
        assert answer.json()["request_headers"] == {}, "nothing is handed over"


async def test_an_alias_would_have_to_be_rewritten() -> None:
    async with Door(aliases={"chat": "llama"}) as door:
        answer = await door.http.post(PATH, json={**BODY, "model": "chat"})
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "alias_not_served"
        assert door.scheduler.active_placements == 0


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"{", 400, "invalid_json"),
        (b'{"model": "other", "prompt": "x"}', 404, "model_not_found"),
        (b"x" * 60_000, 413, "request_too_large"),
    ],
)
async def test_refusals_are_those_of_the_front_door(door: Door, body: bytes, status: int, code: str) -> None:
    answer = await door.http.post(PATH, content=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert "x-request-id" in answer.headers
    assert (await door.http.post("/pick/v1/other", json=BODY)).status_code == 404


async def test_what_is_held_is_answered_in_its_turn() -> None:
    async with Door("m", WaitingRoom(capacity=8)) as door:
        long = {**BODY, "prompt": list(range(8_000)), "max_tokens": 1}
        answers = await asyncio.gather(*(door.http.post(PATH, json=long) for _ in range(4)))
        assert [answer.status_code for answer in answers] == [200] * 4
        await until_over(door)


async def test_work_that_is_no_load_goes_anywhere(door: Door) -> None:
    answer = await door.http.post("/pick/tokenize", json={"model": "llama", "prompt": "x"})
    assert answer.json()["placement_id"] is None
    assert door.scheduler.active_placements == 0


def target(host: str) -> Target:
    return Target("a", f"http://{host}:80", host, 80)


async def test_host_names_are_looked_up_and_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    addresses = Addresses(lambda: now_s)
    assert addresses.known(target("10.1.2.3")) == "10.1.2.3:80"
    assert addresses.known(target("fd00::1")) == "[fd00::1]:80"
    assert addresses.known(target("localhost")) is None
    first, second = await asyncio.gather(*(addresses.of(target("localhost")) for _ in range(2)))
    assert first == second and first in ("127.0.0.1:80", "[::1]:80")
    assert addresses.known(target("localhost")) == first
    assert await addresses.of(target("no-such-host.invalid")) is None

    def away(*_: object, **__: object) -> Any:
        raise socket.gaierror("the resolver is away")

    monkeypatch.setattr(socket, "getaddrinfo", away)
    now_s = 60.0
    assert addresses.known(target("localhost")) == first, "and asked for again, behind"
    await asyncio.sleep(0.05)
    assert addresses.known(target("localhost")) == first
