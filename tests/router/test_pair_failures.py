"""A prefill and a decode instance that serve one request: what passes between them, and what may fail."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import orjson
import pytest

from conductor.placement import FailureKind, RejectedError


async def hang(request: Any, writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(30)


async def server_error(request: Any, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 500 Internal Server Error\r\ncontent-length: 6\r\n\r\nbroken")


@pytest.mark.parametrize("stream", [False, True])
async def test_prefill_hands_over_to_decode(cluster: Any, stream: bool) -> None:
    prefill, decode = await cluster.engine("prefill"), await cluster.engine("decode")
    door = await cluster.door([prefill], [decode])
    body = orjson.dumps(cluster.chat_document(stream=stream, max_tokens=50, min_tokens=3))
    response = await door.client.post(
        "/v1/chat/completions",
        content=body,
        headers={"x-request-id": "r1", "content-type": "application/json"},
    )
    assert response.status_code == 200
    first, second = prefill.received[0], decode.received[0]
    asked = first.document
    assert asked.pop("kv_transfer_params") == {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
    }
    assert asked == cluster.chat_document(stream=False, max_tokens=1, max_completion_tokens=1)
    assert second.body == b'{"kv_transfer_params":' + cluster.TRANSFER + b"," + body[1:]
    assert first.header("x-request-id") == second.header("x-request-id") == "r1"
    calls = [name for name, _ in door.placements.calls]
    assert calls == ["place", "prefill_finished", *["first_token"] * stream, "finished"]
    assert response.headers["x-conductor-prefill-instance"] == "prefill"
    assert response.headers["x-conductor-decode-instance"] == "decode"
    assert door.placements.named("finished")[0].cached_tokens == 8


@pytest.mark.parametrize(
    "fields", [{"prompt": ["one", "two"]}, {"prompt": "one", "n": 2}, {"prompt": "one", "best_of": 2}]
)
async def test_several_answers_do_not_share_blocks(cluster: Any, fields: dict[str, Any]) -> None:
    prefill, decode = await cluster.engine("prefill"), await cluster.engine("decode")
    door = await cluster.door([prefill], [decode])
    body = orjson.dumps({"model": cluster.MODEL, **fields})
    assert (await door.client.post("/v1/completions", content=body)).status_code == 200
    assert not prefill.received and decode.received[0].body == body
    assert door.sample("conductor_handoffs_without_transfer_total") == 1


async def test_prefill_failure_is_retried_on_another_prefill_instance(cluster: Any) -> None:
    bad, good = await cluster.engine("bad", hang), await cluster.engine("good")
    decode = await cluster.engine("decode")
    door = await cluster.door([bad, good], [decode], prefill_timeout_s=0.1)
    response = await door.chat()
    assert response.headers["x-conductor-prefill-instance"] == "good"
    assert len(decode.received) == 1
    [failure] = door.placements.named("failed")
    assert (failure.instance_id, failure.kind) == ("bad", FailureKind.TIMEOUT)


async def test_prefill_refusal_reaches_the_client(cluster: Any) -> None:
    async def refuse(request: Any, writer: asyncio.StreamWriter) -> None:
        writer.write(cluster.json_response(b'{"error":{"message":"too long"}}', "400 Bad Request"))

    prefill, decode = await cluster.engine("prefill", refuse), await cluster.engine("decode")
    door = await cluster.door([prefill], [decode])
    response = await door.chat(stream=True)
    assert (response.status_code, response.content) == (400, b'{"error":{"message":"too long"}}')
    assert not decode.received and door.placements.named("cancelled") == ["p-1"]


async def test_prefill_without_transfer_lets_decode_compute(cluster: Any) -> None:
    async def respond(request: Any, writer: asyncio.StreamWriter) -> None:
        writer.write(cluster.json_response(b'{"kv_transfer_params":null}'))

    prefill, decode = await cluster.engine("prefill", respond), await cluster.engine("decode")
    door = await cluster.door([prefill], [decode])
    assert (await door.chat()).status_code == 200
    assert decode.received[0].document == cluster.chat_document()
    assert door.sample("conductor_handoffs_without_transfer_total") == 1


async def test_unreadable_prefill_answer_is_a_failure(cluster: Any) -> None:
    async def respond(request: Any, writer: asyncio.StreamWriter) -> None:
        writer.write(cluster.json_response(b"not json"))

    bad, good = await cluster.engine("bad", respond), await cluster.engine("good")
    door = await cluster.door([bad, good], [await cluster.engine("decode")])
    assert (await door.chat()).headers["x-conductor-prefill-instance"] == "good"


@pytest.mark.parametrize("prefill_is_gone", [False, True])
async def test_decode_error_blames_the_instance_at_fault(cluster: Any, prefill_is_gone: bool) -> None:
    """A decode instance also answers 500 when it cannot pull from a dead prefill instance."""
    prefills = [await cluster.engine("prefill-0"), await cluster.engine("prefill-1")]

    async def fail_first(request: Any, writer: asyncio.StreamWriter) -> None:
        if prefill_is_gone:
            await prefills[0].stop()
        await server_error(request, writer)

    decodes = [await cluster.engine("decode-0", fail_first), await cluster.engine("decode-1")]
    if prefill_is_gone:
        answers = [fail_first, decodes[1].respond]

        async def fail_once(request: Any, writer: asyncio.StreamWriter) -> None:
            await answers.pop(0)(request, writer)

        decodes[0].respond = fail_once
    door = await cluster.door(prefills, decodes)
    response = await door.chat()
    assert response.status_code == 200
    [failure] = door.placements.named("failed")
    assert failure.instance_id == ("prefill-0" if prefill_is_gone else "decode-0")
    expected = ("prefill-1", "decode-0") if prefill_is_gone else ("prefill-0", "decode-1")
    assert response.headers["x-conductor-prefill-instance"] == expected[0]
    assert response.headers["x-conductor-decode-instance"] == expected[1]


async def test_client_disconnect_during_prefill_closes_that_leg(cluster: Any) -> None:
    prefill, decode = await cluster.engine("prefill", hang), await cluster.engine("decode")
    door = await cluster.door([prefill], [decode])
    connection = await door.connect()
    connection.send(cluster.post(orjson.dumps(cluster.chat_document())))
    await cluster.wait_until(lambda: bool(prefill.received))
    await connection.close()
    await cluster.wait_until(lambda: prefill.open_connections == 0, 2.0)
    assert not decode.received and door.placements.named("cancelled") == ["p-1"]


async def test_unknown_protocol_is_a_clear_error(cluster: Any) -> None:

    prefill = replace((await cluster.engine("prefill")).target, protocol="carrier-pigeon")
    door = await cluster.door([prefill], [await cluster.engine("decode")])
    response = await door.chat()
    assert response.status_code == 500
    message = response.json()["error"]["message"]
    assert "carrier-pigeon" in message and "vllm-nixl" in message
    assert door.placements.open_placements == 0


async def test_a_decode_that_is_not_admitted_is_turned_away(
    cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def hang(request: Any, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(60)

    decode = await cluster.engine("d", hang)
    door = await cluster.door([await cluster.engine("p")], [decode])

    def refuse(placement_id: str, now_s: float) -> None:
        door.placements.calls.append(("cancelled", placement_id))  # the scheduler has ended it
        raise RejectedError("decode is full", "decode", 2.5)

    monkeypatch.setattr(door.placements, "prefill_finished", refuse)
    answer = await door.chat()
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "overloaded_decode")
    assert answer.headers["retry-after"] == "3"
    await cluster.wait_until(lambda: decode.open_connections == 0)
    assert door.placements.open_placements == 0
    assert (await door.client.get("/health")).status_code == 200


async def test_a_response_that_has_begun_is_not_turned_away(cluster: Any) -> None:
    go = asyncio.Event()

    async def slow(request: Any, writer: asyncio.StreamWriter) -> None:
        writer.write(cluster.STREAM_HEAD + cluster.chunk(cluster.event("a")))
        await go.wait()
        writer.write(cluster.chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")

    door = await cluster.door([await cluster.engine("e", slow)])
    async with door.client.stream(
        "POST", "/v1/chat/completions", json=cluster.chat_document(stream=True)
    ) as answer:
        received = answer.aiter_text()
        assert "a" in await anext(received)
        door.services.placement_revoked("p-1", RejectedError("late", "decode", 1.0))
        go.set()
        assert "[DONE]" in "".join([text async for text in received])
    await cluster.wait_until(lambda: door.placements.open_placements == 0)
    assert len(door.placements.named("finished")) == 1
