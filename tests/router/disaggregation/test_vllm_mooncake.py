"""Hand-off between vLLM instances with the MooncakeConnector."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import orjson
import pytest

from conductor.placement import FailureKind, Target

RANKS = (
    b'{"0":{"engine_id":"e-zero","worker_addr":{"0":{"0":"tcp://10.0.0.1:41"}}},"1":{"engine_id":"e-one"}}'
)


class Bootstrap:
    """The server beside a prefill instance, which answers every question with the same bytes, or never."""

    def __init__(self, answer: bytes | None) -> None:
        self.answer = answer
        self.asked: list[bytes] = []
        self.port = 0

    async def start(self) -> asyncio.Server:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        return server

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                self.asked.append(await reader.readuntil(b"\r\n\r\n"))
                if self.answer is not None:
                    writer.write(self.answer)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()


@pytest.fixture
async def bootstrap(cluster: Any) -> Any:
    bootstrap = Bootstrap(cluster.json_response(RANKS))
    server = await bootstrap.start()
    yield bootstrap
    server.close()


def mooncake(target: Target, port: int = 1, rank: int = 0) -> Target:
    return replace(target, protocol="vllm-mooncake", bootstrap_port=port, rank=rank, ranks=2)


@pytest.mark.parametrize(("rank", "engine_id"), [(0, "e-zero"), (1, "e-one")])
@pytest.mark.parametrize("stream", [False, True])
async def test_both_legs_name_the_transfer(
    cluster: Any, bootstrap: Bootstrap, stream: bool, rank: int, engine_id: str
) -> None:
    async def respond(request: Any, writer: asyncio.StreamWriter) -> None:
        choice = {**cluster.ANSWER["choices"][0], "finish_reason": "length"}
        writer.write(cluster.json_response(orjson.dumps({**cluster.ANSWER, "choices": [choice]})))

    prefill, decode = await cluster.engine("prefill", respond), await cluster.engine("decode")
    door = await cluster.door([mooncake(prefill.target, bootstrap.port, rank)], [mooncake(decode.target)])
    body = orjson.dumps(cluster.chat_document(stream=stream, max_tokens=50))
    responses = [await door.client.post("/v1/chat/completions", content=body) for _ in range(2)]
    assert [response.status_code for response in responses] == [200, 200]
    assert [asked.split(b"\r\n")[0] for asked in bootstrap.asked] == [b"GET /query HTTP/1.1"] * 2
    transfers = set()
    for first, second in zip(prefill.received, decode.received, strict=True):
        asked = first.document
        params = asked.pop("kv_transfer_params")
        assert asked == cluster.chat_document(stream=False, max_tokens=1, max_completion_tokens=1)
        transfers.add(params["transfer_id"])
        assert params == {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "transfer_id": params["transfer_id"],
        }
        told = second.document["kv_transfer_params"]
        assert told == {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "remote_bootstrap_addr": f"http://127.0.0.1:{bootstrap.port}",
            "remote_engine_id": engine_id,
            "transfer_id": params["transfer_id"],
        }
        assert second.body == b'{"kv_transfer_params":' + orjson.dumps(told) + b"," + body[1:]
    assert len(transfers) == 2
    assert [name for name, _ in door.placements.calls] == [
        "place",
        "prefill_finished",
        *["first_token"] * stream,
        "finished",
    ] * 2


@pytest.mark.parametrize(
    ("answer", "kept"),
    [
        ({"choices": [{"finish_reason": "length"}]}, True),
        ({"choices": [{"finish_reason": "stop"}]}, False),
        ({"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}, True),
        ({"status": "completed"}, False),
        ({"stop_reason": "max_tokens"}, True),
        ({"stop_reason": "end_turn"}, False),
    ],
)
async def test_blocks_of_an_answer_that_was_over_are_gone(
    cluster: Any, bootstrap: Bootstrap, answer: dict[str, Any], kept: bool
) -> None:
    async def respond(request: Any, writer: asyncio.StreamWriter) -> None:
        writer.write(cluster.json_response(orjson.dumps(answer)))

    prefill, decode = await cluster.engine("prefill", respond), await cluster.engine("decode")
    door = await cluster.door([mooncake(prefill.target, bootstrap.port)], [mooncake(decode.target)])
    assert (await door.chat()).status_code == 200
    assert ("kv_transfer_params" in decode.received[0].document) is kept
    assert door.sample("conductor_handoffs_without_transfer_total") == (0 if kept else 1)


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (b"HTTP/1.1 500 Internal Server Error\r\ncontent-length: 0\r\n\r\n", FailureKind.ERROR),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}", FailureKind.ERROR),
        (b'HTTP/1.1 200 OK\r\ncontent-length: 7\r\n\r\n{"0":5}', FailureKind.ERROR),
        (None, FailureKind.TIMEOUT),
    ],
)
async def test_a_bootstrap_server_without_an_answer_costs_its_instance_the_request(
    cluster: Any, bootstrap: Bootstrap, answer: bytes | None, kind: FailureKind
) -> None:
    bad = Bootstrap(answer)
    server = await bad.start()
    prefills = [await cluster.engine("bad"), await cluster.engine("good")]
    decode = await cluster.engine("decode")
    targets = [mooncake(prefills[0].target, bad.port), mooncake(prefills[1].target, bootstrap.port)]
    door = await cluster.door(targets, [mooncake(decode.target)], bootstrap_timeout_s=0.1)
    response = await door.chat()
    server.close()
    assert (response.status_code, response.headers["x-conductor-prefill-instance"]) == (200, "good")
    [failure] = door.placements.named("failed")
    assert (failure.instance_id, failure.kind) == ("bad", kind)
    assert not prefills[0].received and len(decode.received) == 1


async def test_without_a_bootstrap_server_the_instance_is_unreachable(cluster: Any) -> None:
    prefill, decode = await cluster.engine("prefill"), await cluster.engine("decode")
    door = await cluster.door([mooncake(prefill.target, cluster.unused_port())], [mooncake(decode.target)])
    assert (await door.chat()).status_code == 503
    [failure] = door.placements.named("failed")
    assert (failure.instance_id, failure.kind) == ("prefill", FailureKind.UNREACHABLE)


async def test_a_client_that_leaves_while_the_bootstrap_server_thinks(cluster: Any) -> None:
    silent = Bootstrap(None)
    server = await silent.start()
    prefill, decode = await cluster.engine("prefill"), await cluster.engine("decode")
    door = await cluster.door([mooncake(prefill.target, silent.port)], [mooncake(decode.target)])
    connection = await door.connect()
    connection.send(cluster.post(orjson.dumps(cluster.chat_document())))
    await cluster.wait_until(lambda: bool(silent.asked))
    await connection.close()
    await cluster.wait_until(lambda: door.placements.open_placements == 0)
    server.close()
    assert door.placements.named("cancelled") == ["p-1"]
    assert not prefill.received and not decode.received


@pytest.mark.parametrize("fields", [{"prompt": ["one", "two"]}, {"prompt": "one", "n": 2}])
async def test_several_answers_do_not_share_a_transfer(
    cluster: Any, bootstrap: Bootstrap, fields: dict[str, Any]
) -> None:
    prefill, decode = await cluster.engine("prefill"), await cluster.engine("decode")
    door = await cluster.door([mooncake(prefill.target, bootstrap.port)], [mooncake(decode.target)])
    document = {"model": cluster.MODEL, **fields}
    assert (await door.client.post("/v1/completions", json=document)).status_code == 200
    assert not prefill.received and not bootstrap.asked
    assert decode.received[0].document == document
