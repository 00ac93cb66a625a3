"""Hand-off between SGLang servers: both legs at once, and what happens when one of them fails."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import orjson
import pytest

from conductor.placement import FailureKind, RejectedError, Target
from router.disaggregation import HandoffError, JointHandoff, handoff_protocol
from router.inference import Endpoint, parse_inference

ROOM = ("bootstrap_host", "bootstrap_port", "bootstrap_room")


def sglang(target: Target, rank: int = 0, ranks: int = 1) -> Target:
    return replace(target, protocol="sglang", bootstrap_port=8_765, rank=rank, ranks=ranks)


def answer(cluster: Any, cached_tokens: int | None = None) -> bytes:
    """The prefill server's: one token."""
    usage: dict[str, Any] = {"prompt_tokens": 12, "completion_tokens": 1}
    if cached_tokens is not None:
        usage["prompt_tokens_details"] = {"cached_tokens": cached_tokens}
    return bytes(cluster.json_response(orjson.dumps({**cluster.ANSWER, "usage": usage})))


class Pair:
    """Servers that meet in a room: decode waits for ``prefilled``, as does prefill's answer."""

    def __init__(self, cluster: Any) -> None:
        self.cluster = cluster
        self.prefilled = asyncio.Event()
        self.prefill_answer = answer(cluster)

    async def prefill(self, request: Any, writer: asyncio.StreamWriter) -> None:
        await self.prefilled.wait()
        writer.write(self.prefill_answer)

    async def decode(self, request: Any, writer: asyncio.StreamWriter) -> None:
        await self.prefilled.wait()
        if request.document.get("stream"):
            writer.write(self.cluster.STREAM_HEAD + self.cluster.chunk(self.cluster.event("d")))
            writer.write(self.cluster.chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
        else:
            writer.write(self.cluster.json_response(orjson.dumps(self.cluster.ANSWER)))


async def hang(request: Any, writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(30)


async def server_error(request: Any, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 500 Internal Server Error\r\ncontent-length: 6\r\n\r\nbroken")


async def reset(request: Any, writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()


@pytest.mark.parametrize("stream", [False, True])
async def test_both_servers_get_the_same_request_at_once(cluster: Any, stream: bool) -> None:
    pair = Pair(cluster)
    pair.prefill_answer = answer(cluster, cached_tokens=7)
    prefill = await cluster.engine("prefill", pair.prefill)
    decode = await cluster.engine("decode", pair.decode)
    door = await cluster.door([sglang(prefill.target)], [sglang(decode.target)])
    body = orjson.dumps(cluster.chat_document(stream=stream, max_tokens=50))
    asking = asyncio.ensure_future(door.client.post("/v1/chat/completions", content=body))
    await cluster.wait_until(lambda: bool(prefill.received and decode.received))  # neither has answered
    first, second = prefill.received[0], decode.received[0]
    assert first.body == second.body
    given = {name: first.document[name] for name in ROOM}
    assert (given["bootstrap_host"], given["bootstrap_port"]) == ("127.0.0.1", 8_765)
    assert 0 <= given["bootstrap_room"] < 2**63
    spliced = b"".join(b'"%b":%b,' % (name.encode(), orjson.dumps(value)) for name, value in given.items())
    assert first.body == b"{" + spliced + body[1:]
    pair.prefilled.set()
    response = await asking
    assert response.status_code == 200
    assert response.headers["x-conductor-prefill-instance"] == "prefill"
    assert response.headers["x-conductor-decode-instance"] == "decode"
    if stream:
        assert response.text.endswith("data: [DONE]\n\n")
    else:
        assert response.json() == cluster.ANSWER
    await cluster.wait_until(lambda: door.placements.open_placements == 0)
    calls = [name for name, _ in door.placements.calls]
    assert calls == ["place", "prefill_finished", *["first_token"] * stream, "finished"]
    assert response.headers["x-conductor-attempts"] == "1"


async def test_the_hit_of_the_prefill_server_is_told(cluster: Any) -> None:
    pair = Pair(cluster)
    pair.prefill_answer = answer(cluster, cached_tokens=11)
    late = asyncio.Event()

    async def decode_later(request: Any, writer: asyncio.StreamWriter) -> None:
        await late.wait()
        await pair.decode(request, writer)

    pair.prefilled.set()
    prefill = await cluster.engine("prefill", pair.prefill)
    door = await cluster.door(
        [sglang(prefill.target)], [sglang((await cluster.engine("d", decode_later)).target)]
    )
    asking = asyncio.ensure_future(door.chat())
    await cluster.wait_until(lambda: bool(door.placements.named("prefill_finished")))
    late.set()
    assert (await asking).status_code == 200
    await cluster.wait_until(lambda: door.placements.open_placements == 0)
    assert door.placements.named("finished")[0].cached_tokens == 11


@pytest.mark.parametrize(
    ("behaviour", "kind"),
    [
        (server_error, FailureKind.ERROR),
        (reset, FailureKind.UNREACHABLE),
        (hang, FailureKind.TIMEOUT),
    ],
)
async def test_a_prefill_failure_ends_its_decode_leg_and_another_pair_is_found(
    cluster: Any, behaviour: Any, kind: FailureKind
) -> None:
    pair = Pair(cluster)
    bad = await cluster.engine("bad", behaviour)
    good = await cluster.engine("good", pair.prefill)
    decode = await cluster.engine("decode", pair.decode)
    door = await cluster.door(
        [sglang(bad.target), sglang(good.target)], [sglang(decode.target)], prefill_timeout_s=0.3
    )
    asking = asyncio.ensure_future(door.chat())
    await cluster.wait_until(lambda: len(decode.received) == 2)
    await cluster.wait_until(lambda: decode.open_connections == 1)  # the first decode leg was dropped
    pair.prefilled.set()
    response = await asking
    assert (response.status_code, response.headers["x-conductor-prefill-instance"]) == (200, "good")
    [failure] = door.placements.named("failed")
    assert (failure.instance_id, failure.kind) == ("bad", kind)
    first, second = (received.document["bootstrap_room"] for received in decode.received)
    assert first != second
    assert good.received[0].document["bootstrap_room"] == second
    await cluster.wait_until(lambda: door.placements.open_placements == 0)


@pytest.mark.parametrize(
    ("behaviour", "kind"), [(server_error, FailureKind.ERROR), (reset, FailureKind.UNREACHABLE)]
)
async def test_a_decode_failure_ends_its_prefill_leg(cluster: Any, behaviour: Any, kind: FailureKind) -> None:
    pair = Pair(cluster)
    prefill = await cluster.engine("prefill", pair.prefill)
    bad, good = await cluster.engine("bad", behaviour), await cluster.engine("good", pair.decode)
    door = await cluster.door([sglang(prefill.target)], [sglang(bad.target), sglang(good.target)])
    asking = asyncio.ensure_future(door.chat())
    await cluster.wait_until(lambda: bool(good.received))
    await cluster.wait_until(lambda: len(prefill.received) == 2 and prefill.open_connections <= 2)
    pair.prefilled.set()
    response = await asking
    assert (response.status_code, response.headers["x-conductor-decode-instance"]) == (200, "good")
    [failure] = door.placements.named("failed")
    assert (failure.instance_id, failure.kind) == ("bad", kind)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_room_that_never_completes_is_given_up(cluster: Any, stream: bool) -> None:
    """The prefill server has answered, and the decode server never does."""
    pair = Pair(cluster)
    pair.prefilled.set()
    prefill = await cluster.engine("prefill", pair.prefill)
    stuck, good = await cluster.engine("stuck", hang), await cluster.engine("good", pair.decode)
    settings = {"transfer_timeout_s": 0.2} if stream else {"first_byte_timeout_s": 0.2}
    door = await cluster.door(
        [sglang(prefill.target)], [sglang(stuck.target), sglang(good.target)], **settings
    )
    response = await door.chat(stream=stream)
    assert (response.status_code, response.headers["x-conductor-decode-instance"]) == (200, "good")
    [failure] = door.placements.named("failed")
    assert (failure.instance_id, failure.kind) == ("stuck", FailureKind.TIMEOUT)
    await cluster.wait_until(lambda: stuck.open_connections == 0)


async def test_a_prefill_instance_that_is_lost_does_not_hold_the_request(cluster: Any) -> None:
    pair = Pair(cluster)
    silent, good = await cluster.engine("silent", hang), await cluster.engine("good", pair.prefill)
    decode = await cluster.engine("decode", pair.decode)
    door = await cluster.door([sglang(silent.target), sglang(good.target)], [sglang(decode.target)])
    asking = asyncio.ensure_future(door.chat())
    await cluster.wait_until(lambda: bool(silent.received and decode.received))
    door.services.instance_lost("silent", "no answer to its health check")
    pair.prefilled.set()
    assert (await asking).headers["x-conductor-prefill-instance"] == "good"


@pytest.mark.parametrize("who", ["prefill", "decode"])
async def test_a_refusal_reaches_the_client(cluster: Any, who: str) -> None:
    async def refuse(request: Any, writer: asyncio.StreamWriter) -> None:
        writer.write(cluster.json_response(b'{"error":{"message":"too long"}}', "400 Bad Request"))

    prefill = await cluster.engine("prefill", refuse if who == "prefill" else hang)
    decode = await cluster.engine("decode", refuse if who == "decode" else hang)
    door = await cluster.door([sglang(prefill.target)], [sglang(decode.target)])
    response = await door.chat(stream=True)
    assert (response.status_code, response.content) == (400, b'{"error":{"message":"too long"}}')
    await cluster.wait_until(lambda: door.placements.open_placements == 0)
    assert door.placements.named("cancelled") == ["p-1"]
    other = decode if who == "prefill" else prefill
    await cluster.wait_until(lambda: other.open_connections == 0)


async def test_an_error_within_a_stream_is_a_failure(cluster: Any) -> None:
    async def fail(request: Any, writer: asyncio.StreamWriter) -> None:
        writer.write(cluster.STREAM_HEAD + cluster.chunk(b'data: {"error":{"message":"no room"}}\n\n'))
        writer.write(cluster.chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")

    pair = Pair(cluster)
    bad, good = await cluster.engine("bad", fail), await cluster.engine("good", pair.prefill)
    decode = await cluster.engine("decode", pair.decode)
    door = await cluster.door([sglang(bad.target), sglang(good.target)], [sglang(decode.target)])
    asking = asyncio.ensure_future(door.chat(stream=True))
    await cluster.wait_until(lambda: bool(good.received))
    pair.prefilled.set()
    assert (await asking).headers["x-conductor-prefill-instance"] == "good"
    [failure] = door.placements.named("failed")
    assert "no room" in failure.detail


async def test_a_prefill_that_fails_behind_the_first_byte_does_not_matter(cluster: Any) -> None:
    go, ended = asyncio.Event(), asyncio.Event()

    async def prefill_late(request: Any, writer: asyncio.StreamWriter) -> None:
        await go.wait()
        writer.transport.abort()
        ended.set()

    async def decode(request: Any, writer: asyncio.StreamWriter) -> None:
        writer.write(cluster.STREAM_HEAD + cluster.chunk(cluster.event("a")))
        await ended.wait()
        await asyncio.sleep(0.05)
        writer.write(cluster.chunk(cluster.event("b")) + cluster.chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")

    prefill = await cluster.engine("prefill", prefill_late)
    door = await cluster.door([sglang(prefill.target)], [sglang((await cluster.engine("d", decode)).target)])
    async with door.client.stream(
        "POST", "/v1/chat/completions", json=cluster.chat_document(stream=True)
    ) as response:
        received = response.aiter_text()
        assert "a" in await anext(received)
        go.set()
        assert "".join([text async for text in received]).endswith("data: [DONE]\n\n")
    await cluster.wait_until(lambda: door.placements.open_placements == 0)
    assert not door.placements.named("failed") and len(door.placements.named("finished")) == 1


async def test_a_client_that_leaves_ends_both_legs(cluster: Any) -> None:
    prefill, decode = await cluster.engine("prefill", hang), await cluster.engine("decode", hang)
    door = await cluster.door([sglang(prefill.target)], [sglang(decode.target)])
    connection = await door.connect()
    connection.send(cluster.post(orjson.dumps(cluster.chat_document())))
    await cluster.wait_until(lambda: bool(prefill.received and decode.received))
    await connection.close()
    await cluster.wait_until(lambda: prefill.open_connections == 0 and decode.open_connections == 0)
    await cluster.wait_until(lambda: door.placements.open_placements == 0)
    assert door.placements.named("cancelled") == ["p-1"]


async def test_a_decode_that_is_not_admitted_ends_both_legs(
    cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = Pair(cluster)
    pair.prefilled.set()
    prefill, decode = await cluster.engine("prefill", pair.prefill), await cluster.engine("decode", hang)
    door = await cluster.door([sglang(prefill.target)], [sglang(decode.target)])

    def refuse(placement_id: str, now_s: float) -> None:
        door.placements.calls.append(("cancelled", placement_id))  # the scheduler has ended it
        raise RejectedError("decode is full", "decode", 2.5)

    monkeypatch.setattr(door.placements, "prefill_finished", refuse)
    assert (await door.chat()).status_code == 429
    await cluster.wait_until(lambda: decode.open_connections == 0)
    await cluster.wait_until(lambda: door.placements.open_placements == 0)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_rooms_of_several_prompts_lie_on_the_rank(rank: int) -> None:
    handoff = handoff_protocol("sglang").begin(sglang(Target("p", "http://[::1]:1", "::1", 1), rank, 3))
    assert isinstance(handoff, JointHandoff)
    body = orjson.dumps({"model": "m", "prompt": ["a", "b", "c"], "bootstrap_room": 1})
    document = orjson.loads(handoff.body(parse_inference(Endpoint.COMPLETIONS, body), "m"))
    assert document["bootstrap_host"] == ["[::1]"] * 3 and document["bootstrap_port"] == [8_765] * 3
    rooms = document["bootstrap_room"]
    assert len(set(rooms)) == 3 and {room % 3 for room in rooms} == {rank}
    one = orjson.dumps({"model": "m", "prompt": [1, 2, 3]})
    assert isinstance(
        orjson.loads(handoff.body(parse_inference(Endpoint.COMPLETIONS, one), "m"))["bootstrap_room"], int
    )


@pytest.mark.parametrize("body", [b"", b"[]", b"data: nonsense\n\n", b'{"error":"full"}'])
def test_answers_that_are_none(body: bytes) -> None:
    handoff = handoff_protocol("sglang").begin(Target("p", "http://p:1", "p", 1))
    assert isinstance(handoff, JointHandoff)
    with pytest.raises(HandoffError):
        handoff.prefill_answer(body)
