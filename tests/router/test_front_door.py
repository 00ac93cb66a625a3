"""Requests through the front door: splicing, headers, connections."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
from typing import Any

import openai
import orjson
import pytest

from router.delivery import Delivery
from router.legs import Leg


async def test_openai_client_gets_answers_streamed_and_whole(cluster: Any) -> None:
    engine = await cluster.engine()
    door = await cluster.door([engine])
    async with openai.AsyncOpenAI(base_url=f"{door.server.url}/v1", api_key="k", max_retries=0) as client:
        messages = [{"role": "user", "content": "hi"}]
        answer = await client.chat.completions.create(model=cluster.MODEL, messages=messages)  # type: ignore[arg-type]
        assert answer.choices[0].message.content == "hello"
        stream = await client.chat.completions.create(model=cluster.MODEL, messages=messages, stream=True)  # type: ignore[arg-type]
        texts = [part.choices[0].delta.content async for part in stream if part.choices]
        assert texts == ["0", "1", "2", "3", "4"]
        assert [model.id async for model in client.models.list()] == [cluster.MODEL, "alias"]
        with pytest.raises(openai.NotFoundError) as raised:
            await client.chat.completions.create(model="nope", messages=messages)  # type: ignore[arg-type]
        assert raised.value.code == "model_not_found"
        assert cluster.MODEL in raised.value.message
    usage = door.placements.named("finished")[1]
    assert (usage.prompt_tokens, usage.output_tokens, usage.cached_tokens) == (12, 5, 8)
    assert door.placements.open_placements == 0


async def test_request_body_and_response_bytes_pass_unchanged(cluster: Any) -> None:
    body = b'{ "model":"test/model", "messages": [{"role":"user","content":"\\u00e9 \xc3\xa9"}],'
    body += b'"vllm_xargs":{"a": 1.50}}'
    answer = b'{"spaced" :  "as it is","usage":null}'
    streamed = b"".join(cluster.chunk(cluster.event(str(n))) for n in range(3))
    streamed += b'd;ext="1"\r\ndata: [DONE]\n\r\n0\r\nx-trailer: 1\r\n\r\n'

    async def respond(request: Any, writer: asyncio.StreamWriter) -> None:
        if request.document.get("stream"):
            writer.write(cluster.STREAM_HEAD + streamed)
        else:
            writer.write(cluster.json_response(answer, extra=b"x-engine: 1\r\n"))

    engine = await cluster.engine(respond=respond)
    door = await cluster.door([engine])
    connection = await door.connect()
    connection.send(cluster.post(body))
    head, received = await connection.response()
    assert received == answer
    assert b"x-engine: 1\r\n" in head
    assert engine.received[0].body == body
    stream_body = orjson.dumps(cluster.chat_document(stream=True))
    connection.send(cluster.post(stream_body))
    head = await connection.reader.readuntil(b"\r\n\r\n")
    assert await connection.reader.readuntil(b"x-trailer: 1\r\n\r\n") == streamed
    assert engine.received[1].body == stream_body
    assert engine.connections == 1
    await connection.close()


async def test_headers_towards_engine_and_client(cluster: Any) -> None:
    async def respond(request: Any, writer: asyncio.StreamWriter) -> None:
        extra = b"connection: keep-alive\r\nkeep-alive: timeout=5\r\nx-request-id: engine\r\n"
        extra += b"X-Conductor-Attempts: 9\r\n"
        writer.write(cluster.json_response(b"{}", extra=extra))

    engine = await cluster.engine(respond=respond)
    door = await cluster.door([engine])
    headers = {
        "connection": "keep-alive, x-hop",
        "x-hop": "1",
        "te": "trailers",
        "x-custom": "kept",
        "authorization": "Bearer client",
        "x-request-id": "my-id",
        "x-data-parallel-rank": "7",
    }
    body = orjson.dumps(cluster.chat_document())
    response = await door.client.post("/v1/chat/completions", content=body, headers=headers)
    request = engine.received[0]
    assert request.request_line == "POST /v1/chat/completions HTTP/1.1"
    assert request.header("host") == f"127.0.0.1:{engine.port}"
    assert request.header("content-length") == str(len(body))
    assert request.header("x-request-id") == "my-id"
    assert request.header("x-custom") == "kept"
    assert request.header("authorization") == "Bearer client"
    for dropped in ("connection", "x-hop", "te", "x-data-parallel-rank", "transfer-encoding", "expect"):
        assert request.header(dropped) is None
    assert response.headers["x-request-id"] == "my-id"
    assert response.headers["x-conductor-placement-id"] == "p-1"
    assert response.headers["x-conductor-prefill-instance"] == "e0"
    assert response.headers["x-conductor-decode-instance"] == "e0"
    assert response.headers["x-conductor-overlap-tokens"] == "16"
    assert response.headers["x-conductor-predicted-ttft-ms"] == "12.5"
    assert response.headers["x-conductor-attempts"] == "1"
    assert "keep-alive" not in response.headers


async def test_insane_request_id_is_replaced(cluster: Any) -> None:
    door = await cluster.door([await cluster.engine()])
    body = orjson.dumps(cluster.chat_document())
    for sent in ("x" * 200, "two words"):
        response = await door.client.post(
            "/v1/chat/completions", content=body, headers={"x-request-id": sent}
        )
        assert response.headers["x-request-id"] not in (sent, "")


async def test_engine_key_and_rank_are_set(cluster: Any) -> None:
    from dataclasses import replace

    engine = await cluster.engine()
    door = await cluster.door([replace(engine.target, rank=3, ranks=4, api_key="engine-key")])
    await door.client.post(
        "/v1/chat/completions", json=cluster.chat_document(), headers={"authorization": "Bearer client"}
    )
    assert engine.received[0].header("authorization") == "Bearer engine-key"
    assert engine.received[0].header("x-data-parallel-rank") == "3"


async def test_alias_is_replaced_by_the_engines_name(cluster: Any) -> None:
    engine = await cluster.engine()
    door = await cluster.door([engine])
    assert (await door.chat(model="alias", extra=[1, 2])).status_code == 200
    assert engine.received[0].document == cluster.chat_document(extra=[1, 2])


async def test_inference_and_control_requests_alternate_on_one_connection(cluster: Any) -> None:
    engine = await cluster.engine()
    door = await cluster.door([engine])
    connection = await door.connect()
    body = orjson.dumps(cluster.chat_document())
    for _ in range(3):
        connection.send(b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n")
        head, answer = await connection.response()
        assert head.startswith(b"HTTP/1.1 200") and orjson.loads(answer)["data"][0]["id"] == cluster.MODEL
        connection.send(cluster.post(body))
        head, answer = await connection.response()
        assert orjson.loads(answer) == cluster.ANSWER
    await connection.close()


async def test_the_scheduler_is_asked_for_its_models_in_its_own_thread(
    cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Instances join and leave there, and what is gone through must not change meanwhile."""
    door = await cluster.door([await cluster.engine()])
    threads, models = [], door.placements.models

    def asked() -> Any:
        threads.append(threading.current_thread())
        return models()

    monkeypatch.setattr(door.placements, "models", asked)
    for path in ("/v1/models", f"/v1/models/{cluster.MODEL}", "/v1/models/other"):
        await door.client.get(path)
    assert threads == 3 * [threading.current_thread()]


async def test_pipelined_requests_are_answered_in_order(cluster: Any) -> None:
    async def respond(request: Any, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.02 if request.document["seed"] == 0 else 0)
        writer.write(cluster.json_response(orjson.dumps({"seed": request.document["seed"]})))

    door = await cluster.door([await cluster.engine(respond=respond)])
    connection = await door.connect()
    requests = [cluster.post(orjson.dumps(cluster.chat_document(seed=seed))) for seed in range(4)]
    requests.insert(2, b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
    requests.insert(1, cluster.post(b"not json"))
    connection.send(b"".join(requests))
    answers = [orjson.loads((await connection.response())[1]) for _ in requests]
    assert [answer.get("seed", answer.get("status", "error")) for answer in answers] == [
        0,
        "error",
        1,
        "ok",
        2,
        3,
    ]
    await connection.close()


async def test_long_pipeline_of_errors_does_not_recurse(cluster: Any) -> None:
    door = await cluster.door([await cluster.engine()])
    connection = await door.connect()
    slow = cluster.post(orjson.dumps(cluster.chat_document()))
    connection.send(slow + cluster.post(b"{}") * 2_000)
    for _ in range(2_001):
        await connection.response()
    await connection.close()


async def test_chunked_request_body_and_expect_continue(cluster: Any) -> None:
    engine = await cluster.engine()
    door = await cluster.door([engine])
    body = orjson.dumps(cluster.chat_document())
    connection = await door.connect()
    connection.send(
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
        + cluster.chunk(body[:10])
    )
    await asyncio.sleep(0.01)
    connection.send(cluster.chunk(body[10:]) + b"0\r\n\r\n")
    assert orjson.loads((await connection.response())[1]) == cluster.ANSWER
    assert engine.received[0].body == body
    connection.send(
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: %d\r\n\r\n"
        % len(body)
    )
    assert await connection.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    connection.send(body)
    assert orjson.loads((await connection.response())[1]) == cluster.ANSWER
    await connection.close()


@pytest.mark.parametrize("version", ["1.0", "1.1"])
async def test_connection_close_and_http_1_0(cluster: Any, version: str) -> None:
    door = await cluster.door([await cluster.engine()])
    body = orjson.dumps(cluster.chat_document(stream=True))
    connection = await door.connect()
    connection.send(
        b"POST /v1/chat/completions HTTP/%b\r\nhost: x\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%b"
        % (version.encode(), len(body), body)
    )
    received = await connection.reader.read()
    head, _, payload = received.partition(b"\r\n\r\n")
    assert b"\r\nconnection: close" in head
    if version == "1.0":
        assert b"transfer-encoding" not in head
        assert payload.startswith(b"data: {") and payload.endswith(b"data: [DONE]\n\n")
        assert payload.count(b"\n\n") == 7
    else:
        assert payload.endswith(b"0\r\n\r\n")
    await connection.close()


async def test_connections_are_closed_when_they_were_idle_for_long(cluster: Any) -> None:
    async def respond(request: Any, writer: asyncio.StreamWriter) -> None:
        if len(engine.received) > 1:
            await asyncio.sleep(0.6)
        writer.write(cluster.json_response(b"{}"))

    engine = await cluster.engine(respond=respond)
    door = await cluster.door([engine], keep_alive_timeout_s=0.4)
    connection = await door.connect()
    loop = asyncio.get_running_loop()
    for _ in range(2):  # the second one takes longer, and is not idle
        connection.send(cluster.post(orjson.dumps(cluster.chat_document())))
        assert (await connection.response())[1] == b"{}"
    since_s = loop.time()
    assert await asyncio.wait_for(connection.reader.read(), 20) == b""
    assert loop.time() - since_s > 0.35
    await connection.close()


async def test_close_delimited_response_closes_the_clients_connection(cluster: Any) -> None:
    async def respond(request: Any, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.0 200 OK\r\ncontent-type: application/json\r\n\r\n" + b'{"a":1}')
        await writer.drain()
        writer.close()

    door = await cluster.door([await cluster.engine(respond=respond)])
    connection = await door.connect()
    connection.send(cluster.post(orjson.dumps(cluster.chat_document())))
    received = await connection.reader.read()
    assert received.startswith(b"HTTP/1.1 200 OK\r\n") and received.endswith(b'\r\n\r\n{"a":1}')
    assert len(door.placements.named("finished")) == 1
    await connection.close()


async def test_informational_responses_are_skipped(cluster: Any) -> None:
    async def respond(request: Any, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\nHTTP/1.1 100 Continue\r\n\r\n")
        await asyncio.sleep(0.01)
        writer.write(cluster.json_response(b"{}"))

    door = await cluster.door([await cluster.engine(respond=respond)])
    response = await door.chat()
    assert (response.status_code, response.content) == (200, b"{}")


async def test_4xx_of_the_engine_reaches_the_client_verbatim(cluster: Any) -> None:
    body = b'{"error": {"message": "too long", "type": "BadRequestError", "param": null, "code": 400}}'

    async def respond(request: Any, writer: asyncio.StreamWriter) -> None:
        writer.write(cluster.json_response(body, "400 Bad Request"))

    engine = await cluster.engine(respond=respond)
    door = await cluster.door([engine])
    response = await door.chat()
    assert (response.status_code, response.content) == (400, body)
    assert len(engine.received) == 1
    assert door.placements.named("cancelled") == ["p-1"]


async def test_slow_client_pauses_the_engine(cluster: Any) -> None:
    written = 0

    async def respond(request: Any, writer: asyncio.StreamWriter) -> None:
        nonlocal written
        writer.write(cluster.STREAM_HEAD)
        piece = cluster.chunk(cluster.event("x" * 60_000))
        for _ in range(1_500):
            writer.write(piece)
            written += len(piece)
            await writer.drain()
        writer.write(b"0\r\n\r\n")

    door = await cluster.door([await cluster.engine(respond=respond)])
    connection = await door.connect()
    connection.writer.transport.pause_reading()
    connection.send(cluster.post(orjson.dumps(cluster.chat_document(stream=True))))
    await cluster.wait_until(lambda: written > 0)
    before = -1
    while written != before:
        before = written
        await asyncio.sleep(0.2)
    assert written < 40_000_000
    connection.writer.transport.resume_reading()
    await connection.reader.readuntil(b"\r\n\r\n")
    received = 0
    while received < written + 5 or written < 1_500 * 60_000:
        received += len(await connection.reader.read(1 << 20))
    assert received == written + 5
    await cluster.wait_until(lambda: door.placements.open_placements == 0)
    await connection.close()


@pytest.mark.parametrize("streaming", [False, True])
async def test_client_disconnect_closes_the_engine_connection(cluster: Any, streaming: bool) -> None:
    async def respond(request: Any, writer: asyncio.StreamWriter) -> None:
        if streaming:
            writer.write(cluster.STREAM_HEAD + cluster.chunk(cluster.event()))
        await asyncio.sleep(30)

    engine = await cluster.engine(respond=respond)
    door = await cluster.door([engine])
    connection = await door.connect()
    connection.send(cluster.post(orjson.dumps(cluster.chat_document(stream=True))))
    await cluster.wait_until(lambda: bool(engine.received))
    if streaming:
        await connection.reader.readuntil(b"\r\n\r\n")
    await connection.close()
    await cluster.wait_until(lambda: engine.open_connections == 0, 2.0)
    assert door.placements.named("cancelled") == ["p-1"]
    labels = {"model": cluster.MODEL, "endpoint": "/v1/chat/completions", "code": "499"}
    assert door.sample("conductor_requests_total", **labels) == 1
    assert door.sample("conductor_inflight_requests") == 0


async def test_shutdown_lets_streams_finish_and_ends_those_that_do_not(cluster: Any) -> None:
    go_on = asyncio.Event()

    async def respond(request: Any, writer: asyncio.StreamWriter) -> None:
        writer.write(cluster.STREAM_HEAD + cluster.chunk(cluster.event()))
        if request.document["seed"] == 1:
            await asyncio.sleep(30)
        await go_on.wait()
        writer.write(cluster.chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")

    door = await cluster.door([await cluster.engine(respond=respond)])
    connections = [await door.connect() for _ in range(2)]
    for seed, connection in enumerate(connections):
        connection.send(cluster.post(orjson.dumps(cluster.chat_document(stream=True, seed=seed))))
        await connection.reader.readuntil(b"\r\n\r\n")
    stopping = asyncio.ensure_future(door.server.stop())
    await asyncio.sleep(0.05)
    go_on.set()
    finished, ended = [await connection.reader.read() for connection in connections]
    assert finished.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n") and b"error" not in finished
    assert b"shutting down" in ended and ended.endswith(b"0\r\n\r\n")
    await stopping
    assert door.placements.open_placements == 0
    for connection in connections:
        await connection.close()


async def test_metrics_count_requests_and_tokens(cluster: Any) -> None:
    door = await cluster.door([await cluster.engine()])
    await door.chat()
    await door.chat(stream=True)
    text = (await door.client.get("/metrics")).text
    labels = {"model": cluster.MODEL, "endpoint": "/v1/chat/completions", "code": "200"}
    assert door.sample("conductor_requests_total", **labels) == 2
    assert door.sample("conductor_ttft_seconds_count") == 1
    assert door.sample("conductor_itl_seconds_count") == 1
    assert door.sample("conductor_overlap_tokens_total") == 32
    assert door.sample("conductor_token_source_total", source="none") == 2
    assert "conductor_request_seconds_bucket" in text
    assert json.loads((await door.client.get("/health")).text) == {"status": "ok"}


async def test_finished_requests_are_freed_without_the_collector(cluster: Any) -> None:
    door = await cluster.door([await cluster.engine("p")], [await cluster.engine("d")])
    await door.chat()
    gc.collect()
    gc.disable()
    try:
        for stream in (False, True, False):
            await door.chat(stream=stream)
            await door.chat(model="nope")
        alive = [type(thing).__name__ for thing in gc.get_objects() if isinstance(thing, Delivery | Leg)]
    finally:
        gc.enable()
    assert alive == []
