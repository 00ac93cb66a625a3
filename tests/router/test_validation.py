"""What the front door refuses, and how it says so."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
import pytest
from fastapi import APIRouter, Request

MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        (b'{"model": "m", "messages": [}', None, "line 1, column"),
        (b"", None, "not valid JSON"),
        (b"\xff\xfe", None, "not valid JSON"),
        (b"[" * 100_000, None, "not valid JSON"),
        (b"[1]", None, "must be a JSON object, not a list"),
        (orjson.dumps({"messages": MESSAGES}), "model", "'model' is missing"),
        (orjson.dumps({"model": 5, "messages": MESSAGES}), "model", "not an integer"),
        (orjson.dumps({"model": "", "messages": MESSAGES}), "model", "'model' is empty"),
        (orjson.dumps({"model": "m"}), "messages", "'messages' is missing"),
        (orjson.dumps({"model": "m", "messages": []}), "messages", "empty"),
        (orjson.dumps({"model": "m", "messages": "hi"}), "messages", "not a string"),
        (orjson.dumps({"model": "m", "messages": [*MESSAGES, "hi"]}), "messages[1]", "'role'"),
        (orjson.dumps({"model": "m", "messages": MESSAGES, "n": "2"}), "n", "integer"),
        (orjson.dumps({"model": "m", "messages": MESSAGES, "n": 0}), "n", "at least 1"),
        (orjson.dumps({"model": "m", "messages": MESSAGES, "max_tokens": True}), "max_tokens", "boolean"),
        (orjson.dumps({"model": "m", "messages": MESSAGES, "stream": "yes"}), "stream", "true or false"),
    ],
)
async def test_malformed_chat_requests(cluster: Any, body: bytes, param: str | None, says: str) -> None:
    engine = await cluster.engine()
    door = await cluster.door([engine])
    response = await door.client.post("/v1/chat/completions", content=body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert says in error["message"]
    assert response.headers["x-request-id"]
    assert not engine.received


@pytest.mark.parametrize("fields", [{"model": "alias"}, {"extra": 1}])
async def test_nested_more_deeply_than_can_be_written_anew(cluster: Any, fields: dict[str, Any]) -> None:
    """Readers take 1024 levels, writers 254."""
    engines = [await cluster.engine("e0"), await cluster.engine("e1")]
    door = await cluster.door(engines[:1], engines[1:])
    deep = orjson.dumps(cluster.chat_document(**fields))[:-1] + b',"tools":' + b"[" * 600 + b"]" * 600 + b"}"
    response = await door.client.post("/v1/chat/completions", content=deep)
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (400, "nested_too_deeply") and "at most 250" in error[
        "message"
    ]
    assert door.placements.open_placements == 0 and not engines[0].received + engines[1].received


@pytest.mark.parametrize(
    ("fields", "says"), [({}, "'prompt' is missing"), ({"prompt": ""}, "empty"), ({"prompt": 5}, "integer")]
)
async def test_malformed_completion_requests(cluster: Any, fields: dict[str, Any], says: str) -> None:
    door = await cluster.door([await cluster.engine()])
    response = await door.client.post("/v1/completions", json={"model": cluster.MODEL, **fields})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "prompt")
    assert says in error["message"]


async def test_null_fields_are_left_out_fields(cluster: Any) -> None:
    door = await cluster.door([await cluster.engine()])
    assert (await door.chat(n=None, max_tokens=None, stream=None)).status_code == 200
    assert (await door.chat(max_tokens=7, stream=True)).status_code == 200
    assert [asked.max_output_tokens for asked in door.placements.asked] == [None, 7]
    assert [asked.streamed for asked in door.placements.asked] == [False, True]


async def test_unknown_model_lists_the_served_ones(cluster: Any) -> None:
    door = await cluster.door([await cluster.engine()])
    response = await door.chat(model="gpt-9")
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (404, "model_not_found", "model")
    assert "gpt-9" in error["message"] and cluster.MODEL in error["message"]


async def test_no_instance_asks_to_retry(cluster: Any) -> None:
    door = await cluster.door([])
    response = await door.chat()
    assert response.status_code == 503
    assert response.headers["retry-after"] == "1"
    assert response.json()["error"]["code"] == "no_instance_available"


@pytest.mark.parametrize("path", [b"/v1/chat/completions", b"/rest"])
@pytest.mark.parametrize("declared", [True, False])
async def test_too_long_a_body_is_refused_and_the_answer_arrives(
    cluster: Any, declared: bool, path: bytes
) -> None:
    rest = APIRouter()

    @rest.post("/rest")
    async def length(request: Request) -> int:
        return len(await request.body())

    door = await cluster.door([await cluster.engine()], max_body_bytes=10_000, routers=[rest])
    assert (await door.client.post("/rest", content=b"x" * 10_000)).json() == 10_000
    connection = await door.connect()
    framing = b"content-length: 50000000" if declared else b"transfer-encoding: chunked"
    connection.send(b"POST " + path + b" HTTP/1.1\r\nhost: x\r\n" + framing + b"\r\n\r\n")
    piece = cluster.chunk(b"x" * 100_000)
    for _ in range(50):
        connection.send(piece)
        await asyncio.sleep(0)
    received = await connection.reader.readuntil(b"}}")
    assert received.startswith(b"HTTP/1.1 413 ")
    head, _, body = received.partition(b"\r\n\r\n")
    assert (b"connection: close" in head) == (path != b"/rest")
    error = orjson.loads(body)["error"]
    assert "10000 bytes" in error["message"] and "'server.max_body_bytes'" in error["message"]
    assert error["code"] == "request_too_large"
    await connection.close()
    await cluster.wait_until(lambda: door.sample("conductor_inflight_requests") == 0)


async def test_body_at_the_limit_is_accepted(cluster: Any) -> None:
    body = orjson.dumps(cluster.chat_document())
    door = await cluster.door([await cluster.engine()], max_body_bytes=len(body))
    assert (await door.client.post("/v1/chat/completions", content=body)).status_code == 200
    assert (await door.client.post("/v1/chat/completions", content=body + b" ")).status_code == 413


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x16\x03\x01\x02\x00",
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\ntransfer-encoding: chunked\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\ncontent-length: 4\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: -3\r\n\r\n",
    ],
)
async def test_bytes_that_are_no_request_get_a_400(cluster: Any, garbage: bytes) -> None:
    engine = await cluster.engine()
    door = await cluster.door([engine])
    connection = await door.connect()
    connection.send(garbage)
    received = await connection.reader.read()
    assert received.startswith(b"HTTP/1.1 400 ")
    assert orjson.loads(received.partition(b"\r\n\r\n")[2])["error"]["code"] == "invalid_http"
    assert not engine.received
    await connection.close()


async def test_garbage_behind_a_request_does_not_spoil_its_response(cluster: Any) -> None:
    door = await cluster.door([await cluster.engine()])
    connection = await door.connect()
    connection.send(
        cluster.post(orjson.dumps(cluster.chat_document(stream=True))) + b"\x00\x01 garbage\r\n\r\n"
    )
    received = await connection.reader.read()
    assert received.startswith(b"HTTP/1.1 200 ") and received.endswith(b"0\r\n\r\n")
    assert b"HTTP/1.1 400" not in received
    await connection.close()


# The ASGI application


async def test_models(cluster: Any) -> None:
    door = await cluster.door([await cluster.engine()])
    listed = (await door.client.get("/v1/models")).json()
    assert listed["object"] == "list"
    assert [entry["id"] for entry in listed["data"]] == [cluster.MODEL, "alias"]
    assert listed["data"][0]["max_model_len"] == 4096
    assert (await door.client.get(f"/v1/models/{cluster.MODEL}")).json() == listed["data"][0]
    missing = await door.client.get("/v1/models/nope")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")


async def test_health_gives_the_reason(cluster: Any) -> None:
    door = await cluster.door([], not_ready_reason=lambda: "no instance is up")
    response = await door.client.get("/health")
    assert (response.status_code, response.json()["reason"]) == (503, "no instance is up")


@pytest.mark.parametrize(
    ("method", "path", "status", "says"),
    [
        ("GET", "/v1/chat/completions", 405, "use POST"),
        ("DELETE", "/v1/models", 405, "use GET"),
        ("GET", "/nowhere", 404, "does not exist"),
    ],
)
async def test_errors_have_the_openai_shape(
    cluster: Any, method: str, path: str, status: int, says: str
) -> None:
    door = await cluster.door([])
    response = await door.client.request(method, path)
    assert response.status_code == status
    assert says in response.json()["error"]["message"]
    assert response.json()["error"]["type"] == "invalid_request_error"
