"""Engines that refuse, break, hang and fail, before and after the first byte."""

from __future__ import annotations

import asyncio
import socket
import struct
from dataclasses import replace
from typing import Any

import openai
import orjson
import pytest

from conductor.placement import FailureKind, Target
from router import TokenService


async def reset(request: Any, writer: asyncio.StreamWriter) -> None:
    linger = struct.pack("ii", 1, 0)
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    writer.transport.abort()


async def hang(request: Any, writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(30)


async def server_error(request: Any, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 500 Internal Server Error\r\ncontent-length: 6\r\n\r\nbroken")


async def head_then_death(request: Any, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
    await writer.drain()
    await asyncio.sleep(0.01)
    writer.transport.abort()


async def garbage(request: Any, writer: asyncio.StreamWriter) -> None:
    writer.write(b"SSH-2.0-OpenSSH_9.6\r\n\r\n")


async def bare_line_feeds(request: Any, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\ncontent-length: 2\n\n{}")
    await asyncio.sleep(30)


async def space_before_a_colon(request: Any, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length : 2\r\n\r\n{}")


async def long_head(request: Any, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nx: " + b"y" * 65_536 + b"\r\ncontent-length: 2\r\n\r\n{}")


async def endless_head(request: Any, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\n")
    while True:
        writer.write(b"x: " + b"y" * 10_000 + b"\r\n")
        await writer.drain()


@pytest.mark.parametrize(
    ("behaviour", "kind"),
    [
        (reset, FailureKind.UNREACHABLE),
        (hang, FailureKind.TIMEOUT),
        (server_error, FailureKind.ERROR),
        (head_then_death, FailureKind.UNREACHABLE),
        (garbage, FailureKind.ERROR),
        (bare_line_feeds, FailureKind.ERROR),
        (space_before_a_colon, FailureKind.ERROR),
        (long_head, FailureKind.ERROR),
        (endless_head, FailureKind.ERROR),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_another_instance_takes_over_before_the_first_byte(
    cluster: Any, behaviour: Any, kind: FailureKind, stream: bool
) -> None:
    bad = await cluster.engine("bad", behaviour)
    good = await cluster.engine("good")
    door = await cluster.door([bad, good], first_byte_timeout_s=0.2)
    response = await door.chat(stream=stream)
    assert response.status_code == 200
    assert response.headers["x-conductor-attempts"] == "2"
    assert response.headers["x-conductor-decode-instance"] == "good"
    [failure] = door.placements.named("failed")
    assert (failure.instance_id, failure.kind) == ("bad", kind)
    assert door.placements.asked[1].excluded == {"bad"}
    assert door.placements.asked[1].retry_of == "p-1"
    await cluster.wait_until(lambda: door.placements.open_placements == 0)
    assert good.received[0].body == bad.received[0].body
    assert door.sample("conductor_retries_total", reason=kind.value) == 1


async def test_a_body_that_is_written_anew_is_the_same_for_another_instance(cluster: Any) -> None:
    bad, good = await cluster.engine("bad", server_error), await cluster.engine("good")
    door = await cluster.door([bad, good])
    assert (await door.chat(model="alias", extra=[1, 2])).status_code == 200
    assert good.received[0].body == bad.received[0].body
    assert good.received[0].document == cluster.chat_document(extra=[1, 2])


async def test_refused_connection_is_retried(cluster: Any) -> None:
    port = cluster.unused_port()
    gone = Target("gone", f"http://127.0.0.1:{port}", "127.0.0.1", port)
    door = await cluster.door([gone, await cluster.engine("good")])
    response = await door.chat()
    assert response.status_code == 200
    [failure] = door.placements.named("failed")
    assert failure.kind is FailureKind.UNREACHABLE
    assert f"cannot connect to 127.0.0.1:{port}" in failure.detail


async def test_a_host_that_cannot_be_written_is_an_instance_out_of_reach(cluster: Any) -> None:
    host = "x" * 64  # a label of a name has 63 at most
    door = await cluster.door([Target("odd", f"http://{host}:1", host, 1), await cluster.engine("good")])
    assert (await door.chat()).status_code == 200
    [failure] = door.placements.named("failed")
    assert failure.kind is FailureKind.UNREACHABLE


async def test_stale_pooled_connection_is_replaced_unnoticed(cluster: Any) -> None:
    engine = await cluster.engine()
    door = await cluster.door([engine])
    assert (await door.chat()).status_code == 200
    healthy, answered = engine.respond, []

    async def close_first(request: Any, writer: asyncio.StreamWriter) -> None:
        if not answered:
            answered.append(request)
            writer.transport.abort()
        else:
            await healthy(request, writer)

    engine.respond = close_first
    response = await door.chat()
    assert response.status_code == 200
    assert response.headers["x-conductor-attempts"] == "1"
    assert engine.connections == 2
    assert door.placements.named("failed") == []


async def test_restarted_engine_is_reached_again(cluster: Any) -> None:
    engine = await cluster.engine()
    door = await cluster.door([engine])
    assert (await door.chat()).status_code == 200
    await engine.stop()
    await engine.__aenter__()
    assert (await door.chat()).headers["x-conductor-attempts"] == "1"


async def test_idle_connections_are_closed_before_the_engine_does(cluster: Any) -> None:
    engine = await cluster.engine()
    door = await cluster.door([engine], idle_timeout_s=0.1)
    await door.chat()
    assert engine.open_connections == 1
    await cluster.wait_until(lambda: engine.open_connections == 0)


@pytest.mark.parametrize(("behaviour", "status"), [(server_error, 502), (hang, 504), (reset, 502)])
async def test_all_attempts_failed_says_what_was_tried(cluster: Any, behaviour: Any, status: int) -> None:
    engines = [await cluster.engine(f"e{n}", behaviour) for n in range(4)]
    door = await cluster.door(engines, first_byte_timeout_s=0.1)
    response = await door.chat()
    assert response.status_code == status
    message = response.json()["error"]["message"]
    assert "Tried 3: e0: " in message and "e2: " in message and "e3" not in message
    assert response.headers["x-conductor-attempts"] == "3"
    assert [len(engine.received) for engine in engines] == [1, 1, 1, 0]
    await cluster.wait_until(lambda: door.placements.open_placements == 0)


async def test_no_other_instance_left(cluster: Any) -> None:
    door = await cluster.door([await cluster.engine("e0", server_error)])
    response = await door.chat()
    assert response.status_code == 503
    assert response.headers["retry-after"] == "1"
    assert "HTTP 500: broken" in response.json()["error"]["message"]


async def test_stream_that_dies_ends_with_an_error_event(cluster: Any) -> None:
    async def die(request: Any, writer: asyncio.StreamWriter) -> None:
        writer.write(cluster.STREAM_HEAD + cluster.chunk(cluster.event("a")))
        await writer.drain()
        await asyncio.sleep(0.01)
        writer.write(cluster.chunk(cluster.event("b")) + cluster.chunk(cluster.event("c"))[:-9])
        await writer.drain()
        writer.close()

    engine = await cluster.engine("dying", die)
    door = await cluster.door([engine, await cluster.engine("good")])
    connection = await door.connect()
    connection.send(cluster.post(orjson.dumps(cluster.chat_document(stream=True))))
    head, body = await connection.response()
    assert head.startswith(b"HTTP/1.1 200")
    whole = cluster.chunk(cluster.event("a")) + cluster.chunk(cluster.event("b"))
    assert body.startswith(whole)
    size, _, rest = body[len(whole) :].partition(b"\r\n")
    events = rest[: int(size, 16)]
    assert rest[int(size, 16) :] == b"\r\n0\r\n\r\n"
    error, done = events.removesuffix(b"\n\n").split(b"\n\n")
    document = orjson.loads(error.removeprefix(b"data: "))["error"]
    assert document["code"] == "stream_interrupted" and "'dying'" in document["message"]
    assert done == b"data: [DONE]"
    # the client's connection is still good
    connection.send(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
    assert (await connection.response())[0].startswith(b"HTTP/1.1 200")
    await cluster.wait_until(lambda: door.placements.open_placements == 0)
    assert door.sample("conductor_stream_failures_total") == 1
    assert [failure.instance_id for failure in door.placements.named("failed")] == ["dying"]
    async with openai.AsyncOpenAI(base_url=f"{door.server.url}/v1", api_key="k", max_retries=0) as client:
        messages = [{"role": "user", "content": "hi"}]
        stream = await client.chat.completions.create(model=cluster.MODEL, messages=messages, stream=True)  # type: ignore[arg-type]
        with pytest.raises(openai.APIError, match="in the middle of the response"):
            async for _ in stream:
                pass
    await connection.close()


async def test_stalled_stream_ends_with_an_error_event(cluster: Any) -> None:
    async def stall(request: Any, writer: asyncio.StreamWriter) -> None:
        writer.write(cluster.STREAM_HEAD + cluster.chunk(cluster.event("a")))
        await asyncio.sleep(30)

    engine = await cluster.engine(respond=stall)
    door = await cluster.door([engine], stall_timeout_s=0.2)
    response = await door.chat(stream=True)
    assert "was silent for 0.2 s" in response.text and response.text.endswith("data: [DONE]\n\n")
    await cluster.wait_until(lambda: engine.open_connections == 0)


@pytest.mark.parametrize("framing", [b"content-length: 1000", b"transfer-encoding: chunked"])
async def test_plain_response_that_dies_is_not_passed_off_as_complete(cluster: Any, framing: bytes) -> None:
    async def die(request: Any, writer: asyncio.StreamWriter) -> None:
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n" + framing + b'\r\n\r\n9\r\n{"id":"a"'
        )
        await writer.drain()
        writer.close()

    door = await cluster.door([await cluster.engine(respond=die)])
    connection = await door.connect()
    connection.send(cluster.post(orjson.dumps(cluster.chat_document())))
    received = await connection.reader.read()
    assert received.endswith(b'{"id":"a"')
    await cluster.wait_until(lambda: door.placements.open_placements == 0)
    await connection.close()


async def test_incomplete_event_is_not_completed(cluster: Any) -> None:
    async def die(request: Any, writer: asyncio.StreamWriter) -> None:
        writer.write(cluster.STREAM_HEAD + cluster.chunk(cluster.event()[:20]))
        await writer.drain()
        writer.close()

    door = await cluster.door([await cluster.engine(respond=die)])
    connection = await door.connect()
    connection.send(cluster.post(orjson.dumps(cluster.chat_document(stream=True))))
    received = await connection.reader.read()
    assert received.endswith(cluster.chunk(cluster.event()[:20]))
    await connection.close()


async def test_large_chunk_of_a_stream_is_not_held_back_for_ever(cluster: Any) -> None:
    payload = cluster.event("x" * 1_000_000)

    async def respond(request: Any, writer: asyncio.StreamWriter) -> None:
        writer.write(cluster.STREAM_HEAD + cluster.chunk(payload) + b"0\r\n\r\n")

    door = await cluster.door([await cluster.engine(respond=respond)])
    assert (await door.chat(stream=True)).content == payload


async def test_request_that_cannot_be_written_is_answered_and_released(cluster: Any) -> None:
    engine = await cluster.engine()
    door = await cluster.door([replace(engine.target, api_key="\N{KEY}")])
    response = await door.chat()
    assert (response.status_code, response.json()["error"]["code"]) == (500, "internal_error")
    await cluster.wait_until(lambda: door.placements.open_placements == 0)
    assert door.placements.named("cancelled") == ["p-1"] and not engine.received


# Disaggregated requests


@pytest.mark.parametrize("at_once", [True, False])
async def test_failing_scheduler_is_an_internal_error(
    cluster: Any, monkeypatch: pytest.MonkeyPatch, at_once: bool
) -> None:
    door = await cluster.door([await cluster.engine()])
    monkeypatch.setattr(door.placements, "place", lambda request, now_s: 1 / 0)
    if not at_once:
        monkeypatch.setattr(door.services.tokens, "prompt_at_once", lambda request: None)
    response = await door.chat()
    assert (response.status_code, response.json()["error"]["code"]) == (500, "internal_error")


@pytest.mark.parametrize("call", ["first_token", "finished", "prefill_finished"])
async def test_failing_reports_do_not_cost_the_response(
    cluster: Any, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def broken(*arguments: Any) -> None:
        raise RuntimeError("scheduler bug")

    door = await cluster.door([await cluster.engine("p")], [await cluster.engine("d")])
    monkeypatch.setattr(door.placements, call, broken)
    for _ in range(2):
        assert (await door.chat(stream=True)).text.endswith("data: [DONE]\n\n")


async def test_bug_while_a_request_begins_is_an_internal_error(
    cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    door = await cluster.door([await cluster.engine()])
    monkeypatch.setattr(door.services.tokens, "prompt_at_once", lambda request: 1 / 0)
    response = await door.chat()
    assert (response.status_code, response.json()["error"]["code"]) == (500, "internal_error")
    assert door.sample("conductor_inflight_requests") == 0


async def test_template_that_fails_in_an_unforeseen_way_degrades(cluster: Any) -> None:
    class Broken:
        plain = None

        def tokens(self, request: Any) -> Any:
            raise ZeroDivisionError

    door = await cluster.door([await cluster.engine()], tokens=TokenService({"*": Broken()}))  # type: ignore[dict-item]
    assert (await door.chat()).status_code == 200
    assert (await door.chat(messages=[{"role": "user", "content": "x" * 10_000}])).status_code == 200
