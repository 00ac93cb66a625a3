"""What nobody foresaw, late in a request: it gets one complete answer or one error, and leaves nothing behind."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import httpx
import orjson
import pytest

from conductor.placement import Target
from router import EngineTokenizer, TokenService

UNWRITABLE = "\N{KEY}"  # no header field can carry it


async def answered_and_over(cluster: Any, door: Any) -> None:
    """Nothing of the requests so far is held, and the next one is served."""
    await cluster.wait_until(lambda: not door.services.active and door.placements.open_placements == 0)
    assert (await door.client.get("/health")).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_decode_leg_that_cannot_be_written(cluster: Any, stream: bool) -> None:
    prefill, decode = await cluster.engine("prefill"), await cluster.engine("decode")
    door = await cluster.door([prefill], [replace(decode.target, api_key=UNWRITABLE)])
    response = await door.chat(stream=stream)
    assert (response.status_code, response.json()["error"]["code"]) == (500, "internal_error")
    assert len(prefill.received) == 1 and not decode.received
    assert door.placements.named("cancelled") == ["p-1"]
    await answered_and_over(cluster, door)


async def test_connection_that_cannot_even_be_tried(cluster: Any) -> None:
    door = await cluster.door([Target("odd", "http://127.0.0.1:70000", "127.0.0.1", 70_000)])
    response = await door.chat()
    assert (response.status_code, response.json()["error"]["code"]) == (500, "internal_error")
    await answered_and_over(cluster, door)


@pytest.mark.parametrize("disaggregated", [False, True])
async def test_instance_whose_name_cannot_stand_in_a_header(cluster: Any, disaggregated: bool) -> None:
    engines = [await cluster.engine("\u00fcber\u5efa"), await cluster.engine("two words")]
    door = await cluster.door(engines[:1], engines[1:] if disaggregated else None)
    response = await door.chat()
    assert (response.status_code, response.json()) == (200, cluster.ANSWER)
    assert response.headers["x-conductor-prefill-instance"] == "%C3%BCber%E5%BB%BA"
    if disaggregated:
        assert response.headers["x-conductor-decode-instance"] == "two words"
    await answered_and_over(cluster, door)


@pytest.mark.parametrize("digits", [16, 400, 1_900])
async def test_counts_that_are_no_counts(cluster: Any, digits: int) -> None:
    usage = b'{"prompt_tokens":12,"completion_tokens":' + b"9" * digits + b"}"

    async def respond(request: Any, writer: asyncio.StreamWriter) -> None:
        writer.write(cluster.STREAM_HEAD + cluster.chunk(cluster.event()) + cluster.chunk(cluster.event()))
        last = b'data: {"choices":[],"usage":' + usage + b"}\n\n"
        writer.write(cluster.chunk(last) + cluster.chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")

    door = await cluster.door([await cluster.engine(respond=respond)])
    response = await door.chat(stream=True)
    assert response.text.endswith("data: [DONE]\n\n")
    [told] = door.placements.named("finished")
    assert told.output_tokens == 3  # of the events
    await answered_and_over(cluster, door)


async def test_content_length_without_end_is_a_malformed_answer(cluster: Any) -> None:
    async def respond(request: Any, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: " + b"9" * 5_000 + b"\r\n\r\n{}")

    bad, good = await cluster.engine("bad", respond), await cluster.engine("good")
    door = await cluster.door([bad, good])
    assert (await door.chat()).headers["x-conductor-decode-instance"] == "good"
    await answered_and_over(cluster, door)


async def test_begun_response_ends_with_an_error_event(cluster: Any) -> None:
    """The router's own fault in the middle of a stream does not look like its end."""
    go = asyncio.Event()

    async def respond(request: Any, writer: asyncio.StreamWriter) -> None:
        writer.write(cluster.STREAM_HEAD + cluster.chunk(cluster.event("a")))
        await go.wait()
        writer.write(cluster.chunk(cluster.event("b")) + b"0\r\n\r\n")

    engine = await cluster.engine(respond=respond)
    door = await cluster.door([engine])
    connection = await door.connect()
    connection.send(cluster.post(orjson.dumps(cluster.chat_document(stream=True))))
    received = await connection.reader.readuntil(b"\n\n\r\n")
    [exchange] = door.services.active
    exchange.fail_unexpectedly()
    received += await connection.reader.read()
    assert received.count(b"HTTP/1.1 ") == 1 and received.count(b"data: [DONE]") == 1
    assert b"internal error" in received and received.endswith(b"0\r\n\r\n")
    await cluster.wait_until(lambda: engine.open_connections == 0)
    await answered_and_over(cluster, door)
    await connection.close()


@pytest.mark.parametrize("tokens", [b"[[1,2],[3,4]]", b"7", b'["a"]', b"[-1]"])
async def test_engine_that_tokenizes_to_nonsense(cluster: Any, tokens: bytes) -> None:
    async def respond(request: Any, writer: asyncio.StreamWriter) -> None:
        if request.request_line.startswith("POST /tokenize "):
            writer.write(cluster.json_response(b'{"tokens":' + tokens + b"}"))
        else:
            writer.write(cluster.json_response(orjson.dumps(cluster.ANSWER)))

    engine = await cluster.engine(respond=respond)

    async def url_for(model: str) -> str:
        return str(engine.target.url)

    async with httpx.AsyncClient() as client:
        door = await cluster.door([engine], tokens=TokenService(engine=EngineTokenizer(client, url_for)))
        assert (await door.chat()).json() == cluster.ANSWER
    assert door.placements.asked[0].token_source == "none"
