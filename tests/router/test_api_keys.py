"""Keys of clients: who is served, how much, and that nothing of a key goes further."""

from __future__ import annotations

import asyncio
import base64
import hashlib
from typing import Any

import openai
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conductor.placement import RejectedError
from router import ApiKey, KeyLimits, KeyRing
from router.accounts import Account, Allowance, TenantCounts

SECRET = "sk-" + "s3cret" * 4
BEARER = {"authorization": f"Bearer {SECRET}"}
CHAT = "/v1/chat/completions"


class Clock:
    def __init__(self) -> None:
        self.now_s = 1_000.0

    def __call__(self) -> float:
        return self.now_s


def ring(*, secret: str = SECRET, **fields: Any) -> KeyRing:
    limits = {name: fields.pop(name) for name in KeyLimits.__slots__ if name in fields}
    named = {"name": "alice", "tenant": "research", **fields}
    return KeyRing(
        [ApiKey(sha256=hashlib.sha256(secret.encode()).digest(), limits=KeyLimits(**limits), **named)]
    )


def basic(password: str) -> str:
    return "Basic " + base64.b64encode(f"anyone:{password}".encode()).decode()


async def test_only_known_keys_are_served(cluster: Any) -> None:
    engine = await cluster.engine()
    door = await cluster.door([engine], keys=ring())
    for headers, code in (
        ({}, "missing_api_key"),
        ({"authorization": "Basic " + SECRET}, "missing_api_key"),
        ({"authorization": basic("")}, "missing_api_key"),
        ({"authorization": basic("wrong")}, "invalid_api_key"),
        ({"authorization": "Digest " + SECRET}, "missing_api_key"),
        ({"authorization": "Bearer"}, "missing_api_key"),
        ({"authorization": "Bearer " + SECRET[:-1]}, "invalid_api_key"),
        ({"x-api-key": SECRET + "x"}, "invalid_api_key"),
        ({"authorization": "Bearer wrong", "x-api-key": SECRET}, "invalid_api_key"),
    ):
        response = await door.client.post(CHAT, json=cluster.chat_document(), headers=headers)
        error = response.json()["error"]
        assert (response.status_code, error["code"], error["type"]) == (401, code, "authentication_error")
    assert not engine.received
    for headers in (
        BEARER,
        {"authorization": f"bearer {SECRET}"},
        {"x-api-key": SECRET},
        {"authorization": basic(SECRET)},
    ):
        response = await door.client.post(CHAT, json=cluster.chat_document(), headers=headers)
        assert response.status_code == 200
    async with openai.AsyncOpenAI(base_url=f"{door.server.url}/v1", api_key="no", max_retries=0) as client:
        with pytest.raises(openai.AuthenticationError):
            await client.chat.completions.create(model=cluster.MODEL, messages=[])


async def test_anthropics_clients_are_told_in_their_envelope(cluster: Any) -> None:
    door = await cluster.door([await cluster.engine()], keys=ring())
    body = {"model": cluster.MODEL, "max_tokens": 5, "messages": [{"role": "user", "content": "x"}]}
    refused = await door.client.post("/v1/messages", json=body, headers={"x-api-key": "wrong"})
    assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")
    assert (
        await door.client.post("/v1/messages", json=body, headers={"x-api-key": SECRET})
    ).status_code == 200


async def test_a_stranger_is_refused_before_sending_the_body(cluster: Any) -> None:
    door = await cluster.door([await cluster.engine()], keys=ring(), linger_s=0.05)
    connection = await door.connect()
    connection.send(b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\n\r\n" % CHAT.encode())
    head, _ = await connection.response()
    assert head.startswith(b"HTTP/1.1 401") and b"connection: close" in head
    assert await connection.reader.read() == b""
    await connection.close()


async def test_engines_never_see_a_clients_key(cluster: Any) -> None:
    from dataclasses import replace

    plain, keyed = await cluster.engine("plain"), await cluster.engine("keyed")
    for engine, own in ((plain, None), (keyed, "engine-key")):
        door = await cluster.door([replace(engine.target, api_key=own)], keys=ring())
        headers = {**BEARER, "x-api-key": "also-mine", "x-kept": "1"}
        assert (
            await door.client.post(CHAT, json=cluster.chat_document(), headers=headers)
        ).status_code == 200
        received = engine.received[0]
        assert received.header("authorization") == (f"Bearer {own}" if own else None)
        assert received.header("x-api-key") is None
        assert received.header("x-kept") == "1"


async def test_without_keys_credentials_pass_unless_the_engine_has_its_own(cluster: Any) -> None:
    from dataclasses import replace

    engine = await cluster.engine()
    for own in (None, "engine-key"):
        door = await cluster.door([replace(engine.target, api_key=own)])
        await door.client.post(CHAT, json=cluster.chat_document(), headers={**BEARER, "x-api-key": "k"})
    first, second = engine.received
    assert (first.header("authorization"), first.header("x-api-key")) == (BEARER["authorization"], "k")
    assert (second.header("authorization"), second.header("x-api-key")) == ("Bearer engine-key", None)


@pytest.mark.parametrize(("sent", "priority"), [(None, 2), ("8", 2), ("2", 2), ("-3", -3)])
async def test_the_key_says_whose_request_it_is_and_how_urgent_it_may_be(
    cluster: Any, sent: str | None, priority: int
) -> None:
    door = await cluster.door([await cluster.engine()], keys=ring(priority=2))
    headers = {**BEARER, "x-conductor-tenant": "somebody else"} | (
        {"x-conductor-priority": sent} if sent else {}
    )
    await door.client.post(CHAT, json=cluster.chat_document(), headers=headers)
    asked = door.placements.asked[0]
    assert (asked.tenant, asked.priority) == ("research", priority)


async def test_a_key_may_be_for_some_models_only(cluster: Any) -> None:
    door = await cluster.door([await cluster.engine()], keys=ring(models=frozenset({"alias"})))
    answers = [
        await door.client.post(CHAT, json=cluster.chat_document(model=model), headers=BEARER)
        for model in ("alias", cluster.MODEL)
    ]
    assert [answer.status_code for answer in answers] == [200, 403]
    error = answers[1].json()["error"]
    assert (error["code"], error["param"]) == ("model_not_allowed", "model")
    assert "alias" in error["message"]


@pytest.mark.parametrize("admin", [False, True])
async def test_the_rest_api_is_for_administrators(cluster: Any, admin: bool) -> None:
    door = await cluster.door([await cluster.engine()], keys=ring(admin=admin))
    for path in ("/health", "/metrics", "/docs", "/openapi.json"):
        assert (await door.client.get(path)).status_code == 200
    for path in ("/v1/models", "/v1/placements", "/nowhere"):
        assert (await door.client.get(path)).status_code == 401
    assert (await door.client.get("/v1/models", headers=BEARER)).status_code == 200
    for path in ("/v1/placements", "/v1/modelsx", "/nowhere"):
        assert (await door.client.get(path, headers=BEARER)).status_code == (404 if admin else 403)


@pytest.mark.parametrize("registers", [False, True])
async def test_a_key_that_registers_may_do_that_and_no_more(cluster: Any, registers: bool) -> None:
    door = await cluster.door([await cluster.engine()], keys=ring(registers=registers))

    async def refused(method: str, path: str) -> bool:
        return (await door.client.request(method, path, headers=BEARER, json={})).status_code == 403

    for method, path in (
        ("PUT", "/v1/instances/e?ttl_s=15"),
        ("POST", "/v1/instances/e/heartbeat"),
        ("GET", "/v1/instances/e"),
        ("DELETE", "/v1/instances/e?registered=true&drain=true"),
    ):
        assert await refused(method, path) is not registers
    for method, path in (
        ("PUT", "/v1/instances/e"),
        ("PUT", "/v1/instances/e?ttl_s="),
        ("DELETE", "/v1/instances/e"),
        ("DELETE", "/v1/instances/e?registered=false"),
        ("DELETE", "/v1/instances/e?registered=true&registered=false"),
        ("GET", "/v1/instances"),
        ("POST", "/v1/instances/e/other"),
        ("GET", "/v1/placements"),
    ):
        assert await refused(method, path)


async def test_requests_per_minute(cluster: Any) -> None:
    clock = Clock()
    door = await cluster.door([await cluster.engine()], keys=ring(requests_per_minute=2), clock=clock)

    async def ask() -> Any:
        return await door.client.post(CHAT, json=cluster.chat_document(), headers=BEARER)

    first = await ask()
    assert {name: value for name, value in first.headers.items() if name.startswith("x-ratelimit")} == {
        "x-ratelimit-limit-requests": "2",
        "x-ratelimit-remaining-requests": "1",
        "x-ratelimit-reset-requests": "30s",
    }
    assert (await ask()).headers["x-ratelimit-reset-requests"] == "1m0s"
    clock.now_s += 6
    refused = await ask()
    error = refused.json()["error"]
    assert (refused.status_code, error["code"]) == (429, "rate_limit_exceeded")
    assert "2 requests per minute" in error["message"] and "'alice'" in error["message"]
    assert refused.headers["retry-after"] == "24"
    assert refused.headers["x-ratelimit-remaining-requests"] == "0"
    clock.now_s += 24
    assert (await ask()).status_code == 200
    labels = {"tenant": "research"}
    assert door.sample("conductor_tenant_requests_total", code="200", **labels) == 3
    assert door.sample("conductor_tenant_requests_total", code="429", **labels) == 1
    assert door.sample("conductor_tenant_refused_total", limit="requests", **labels) == 1


async def test_tokens_are_taken_by_the_prompt_and_settled_by_the_usage(cluster: Any) -> None:
    clock = Clock()
    door = await cluster.door([await cluster.engine()], keys=ring(tokens_per_minute=60), clock=clock)

    async def ask(tokens: int) -> Any:
        body = {"model": cluster.MODEL, "prompt": list(range(tokens))}
        return await door.client.post("/v1/completions", json=body, headers=BEARER)

    first = await ask(40)
    assert first.headers["x-ratelimit-remaining-tokens"] == "20"
    # The engine says that it were 12 prompt tokens and 5 more: 43 are left.
    refused = await ask(44)
    assert refused.status_code == 429
    assert refused.headers["x-ratelimit-remaining-tokens"] == "43"
    assert refused.headers["retry-after"] == "1"
    assert "60 tokens per minute" in refused.json()["error"]["message"]
    assert (await ask(43)).status_code == 200
    hopeless = await ask(61)
    assert (hopeless.status_code, hopeless.json()["error"]["code"]) == (429, "prompt_exceeds_limit")
    assert "retry-after" not in hopeless.headers
    assert door.sample("conductor_tenant_tokens_total", tenant="research", kind="prompt") == 24
    assert door.sample("conductor_tenant_tokens_total", tenant="research", kind="output") == 10
    assert door.sample("conductor_tenant_refused_total", tenant="research", limit="tokens") == 2


async def test_a_request_that_failed_costs_no_tokens(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    door = await cluster.door([await cluster.engine()], keys=ring(tokens_per_minute=60), clock=Clock())

    def full(request: Any, now_s: float) -> None:
        raise RejectedError("full", "queue", 3.0)

    monkeypatch.setattr(door.placements, "place", full)
    body = {"model": cluster.MODEL, "prompt": list(range(60))}
    for _ in range(3):
        response = await door.client.post("/v1/completions", json=body, headers=BEARER)
        assert response.json()["error"]["code"] == "overloaded_queue"
    assert door.sample("conductor_tenant_tokens_total", tenant="research", kind="prompt") == 0


async def test_concurrency_is_released_once_however_a_request_ends(cluster: Any) -> None:
    async def respond(request: Any, writer: asyncio.StreamWriter) -> None:
        kind = request.document.get("kind")
        if kind == "hang":
            await asyncio.sleep(30)
        elif kind == "stream":
            writer.write(cluster.STREAM_HEAD + cluster.chunk(cluster.event("a")))
            await writer.drain()
            await asyncio.sleep(30)
        elif kind == "die":
            writer.close()
        elif kind == "break":
            writer.write(cluster.STREAM_HEAD + cluster.chunk(cluster.event("a")))
            await writer.drain()
            writer.close()
        elif kind == "500":
            writer.write(cluster.json_response(b"{}", status="500 Broken"))
        elif kind == "400":
            writer.write(cluster.json_response(b"{}", status="400 Bad"))
        else:
            writer.write(cluster.json_response(orjson.dumps(cluster.ANSWER)))

    door = await cluster.door(
        [await cluster.engine("a", respond), await cluster.engine("b", respond)], keys=ring(concurrency=1)
    )
    header = f"authorization: Bearer {SECRET}\r\n".encode()

    def active() -> float:
        return door.sample("conductor_tenant_active_requests", tenant="research")

    for kind in ("ok", "400", "500", "die", "break", "model", "malformed"):
        body = cluster.chat_document(kind=kind, stream=kind == "break")
        if kind == "model":
            body["model"] = "nope"
        elif kind == "malformed":
            body["messages"] = []
        await door.client.post(CHAT, json=body, headers=BEARER)
        assert active() == 0, kind
    for kind in ("hang", "stream"):
        connection = await door.connect()
        connection.send(
            cluster.post(orjson.dumps(cluster.chat_document(kind=kind, stream=True)), extra=header)
        )
        await cluster.wait_until(lambda: active() == 1)
        refused = await door.client.post(CHAT, json=cluster.chat_document(), headers=BEARER)
        assert refused.status_code == 429
        assert "1 requests at a time" in refused.json()["error"]["message"]
        assert refused.headers["retry-after"] == "1"
        assert active() == 1
        await connection.close()
        await cluster.wait_until(lambda: active() == 0)
    assert (await door.client.post(CHAT, json=cluster.chat_document(), headers=BEARER)).status_code == 200
    await cluster.wait_until(lambda: door.placements.open_placements == 0)
    # One token had reached the client that left in the middle of the stream.
    assert door.sample("conductor_tenant_tokens_total", tenant="research", kind="output") >= 6


async def test_pipelined_requests_count_when_their_turn_comes(cluster: Any) -> None:
    door = await cluster.door([await cluster.engine()], keys=ring(concurrency=1))
    connection = await door.connect()
    header = f"x-api-key: {SECRET}\r\n".encode()
    connection.send(cluster.post(orjson.dumps(cluster.chat_document()), extra=header) * 3)
    for _ in range(3):
        assert (await connection.response())[0].startswith(b"HTTP/1.1 200")
    await connection.close()


async def test_shutting_down_releases_what_is_in_progress(cluster: Any) -> None:
    async def hang(request: Any, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(30)

    keys = ring(concurrency=1)
    door = await cluster.door([await cluster.engine(respond=hang)], keys=keys)
    asking = asyncio.ensure_future(door.client.post(CHAT, json=cluster.chat_document(), headers=BEARER))
    await cluster.wait_until(lambda: keys.tenants["research"].active == 1)
    await door.server.stop()
    assert (await asking).status_code == 503
    assert keys.tenants["research"].active == 0


def test_keys_that_are_the_same_are_refused() -> None:
    digest = hashlib.sha256(b"k").digest()
    with pytest.raises(ValueError, match="'a' and 'b' are the same"):
        KeyRing([ApiKey("a", digest, "t"), ApiKey("b", digest, "u")])


async def test_keys_are_replaced_while_clients_stay_connected(cluster: Any) -> None:
    """One connection, whose head is known after the second request."""
    keys = ring(requests_per_minute=9, priority=1)
    door = await cluster.door([await cluster.engine()], keys=keys)

    async def ask() -> Any:
        return await door.client.post(
            CHAT, json=cluster.chat_document(), headers={**BEARER, "x-conductor-priority": "8"}
        )

    left = [(await ask()).headers["x-ratelimit-remaining-requests"] for _ in range(3)]
    assert left == ["8", "7", "6"]
    assert await door.use_keys(ring(requests_per_minute=9, priority=3).keys)
    assert (await ask()).headers["x-ratelimit-remaining-requests"] == "5"
    assert await door.use_keys(ring(requests_per_minute=9, tenant="sales").keys)
    assert (await ask()).headers["x-ratelimit-remaining-requests"] == "8"
    assert [(each.tenant, each.priority) for each in door.placements.asked[2:]] == [
        ("research", 1),
        ("research", 3),
        ("sales", 0),
    ]
    assert await door.use_keys(ring(secret="another").keys)
    refused = await ask()
    assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
    assert (
        await door.client.post(CHAT, json=cluster.chat_document(), headers={"x-api-key": "another"})
    ).is_success
    assert door.sample("conductor_tenant_requests_total", code="200", tenant="research") == 5
    assert door.sample("conductor_tenant_requests_total", code="200", tenant="sales") == 1


async def test_what_a_replaced_key_began_is_finished_and_counted_for_it(cluster: Any) -> None:
    go_on = asyncio.Event()

    async def respond(request: Any, writer: asyncio.StreamWriter) -> None:
        writer.write(cluster.STREAM_HEAD + cluster.chunk(cluster.event()))
        await go_on.wait()
        writer.write(cluster.chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")

    keys = ring(concurrency=1)
    door = await cluster.door([await cluster.engine("e0", respond)], keys=keys)
    body = cluster.chat_document(stream=True)
    async with door.client.stream("POST", CHAT, json=body, headers=BEARER) as response:
        lines = response.aiter_lines()
        assert (await anext(lines)).startswith("data: ")
        assert await door.use_keys(ring(secret="another").keys)
        assert keys.tenants["research"].active == 1
        go_on.set()
        assert [line async for line in lines if line][-1] == "data: [DONE]"
    await cluster.wait_until(lambda: keys.tenants["research"].active == 0)


@pytest.mark.parametrize("keys", [None, ring()])
async def test_an_open_door_stays_open_and_a_closed_one_closed(cluster: Any, keys: KeyRing | None) -> None:
    door = await cluster.door([await cluster.engine()], keys=keys)
    assert not await door.use_keys(ring().keys if keys is None else [])
    answer = await door.client.post(CHAT, json=cluster.chat_document())
    assert answer.status_code == (200 if keys is None else 401)


def test_of_keys_that_are_the_same_none_is_taken() -> None:
    keys = ring()
    before = keys.keys
    digest = hashlib.sha256(b"k").digest()
    with pytest.raises(ValueError, match="'a' and 'b' are the same"):
        keys.replace([ApiKey("a", digest, "t"), ApiKey("b", digest, "u")])
    assert keys.keys is before
    assert keys.identify([(b"x-api-key", SECRET.encode())])[0].name == "alice"


def test_nothing_of_a_key_is_shown() -> None:
    key = ApiKey("a", hashlib.sha256(SECRET.encode()).digest(), "t")
    assert "sha256" not in repr(key)


@given(st.lists(st.tuples(st.floats(0, 90), st.integers(1, 40)), max_size=40))
def test_an_allowance_never_gives_more_than_its_rate_and_one_burst(asked: list[tuple[float, int]]) -> None:
    allowance, now_s, taken = Allowance(60), 0.0, 0
    for pause_s, amount in asked:
        now_s += pause_s
        if allowance.wait_s(amount, now_s) == 0:
            allowance.take(amount, now_s)
            taken += amount
        else:
            later_s = now_s + allowance.wait_s(amount, now_s) + 1e-6
            assert allowance.wait_s(amount, later_s) == 0, "the wait that was told is enough"
            now_s = later_s
        assert 0 <= allowance.left(now_s) <= 60
    assert taken <= 60 + now_s + 1e-6


def test_an_answer_may_overdraw_and_the_next_request_waits() -> None:
    account = Account("a", KeyLimits(tokens_per_minute=60), TenantCounts())
    grant = account.enter(0.0)
    grant.take_tokens(10, 0.0)
    for _ in range(2):
        grant.end(0.0, failed=False, prompt_tokens=10, output_tokens=80)
    with pytest.raises(Exception, match="31s"):
        account.take_tokens(1, 0.0)
    account.take_tokens(1, 31.1)
    assert account.tenant.active == 0
