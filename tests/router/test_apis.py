"""Routes beside chat and text completions: spliced alike, checked and failed in the words of their own APIs."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import orjson
import pytest
from msgspec.structs import replace

from conductor.placement import RejectedError, TokenSource, Usage
from router import TokenService
from router.placement_view import placement_view

USER = {"role": "user", "content": "hi"}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": [USER], "max_tokens": 8},
    "/v1/embeddings": {"input": ["a", "b"]},
    "/v1/rerank": {"query": "a", "documents": ["b"]},
    "/rerank": {"query": "a", "documents": ["b"]},
    "/v1/score": {"text_1": "a", "text_2": ["b"]},
    "/score": {"queries": "a", "items": ["b"]},
    "/inference/v1/generate": {"token_ids": [5, 6], "sampling_params": {}},
    "/generate": {"input_ids": [5, 6]},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [1, 2]},
}


@pytest.mark.parametrize("path", BODIES)
async def test_every_route_is_spliced_byte_for_byte(cluster: Any, path: str) -> None:
    answer = b'{"as": [ 1.50,"it is" ]}'

    async def respond(request: Any, writer: asyncio.StreamWriter) -> None:
        writer.write(cluster.json_response(answer, extra=b"x-engine: 1\r\n"))

    engine = await cluster.engine(respond=respond)
    door = await cluster.door([engine])
    body = b' {"model":"test/model", "extra": 1.0,' + orjson.dumps(BODIES[path])[1:]
    response = await door.client.post(f"{path}?q=1", content=body)
    assert (response.status_code, response.content) == (200, answer)
    assert response.headers["x-engine"] == "1"
    assert response.headers["x-conductor-decode-instance"] == "e0"
    assert engine.received[0].request_line == f"POST {path}?q=1 HTTP/1.1"
    assert engine.received[0].body == body
    assert door.placements.open_placements == 0


@pytest.mark.parametrize("path", BODIES)
async def test_an_alias_becomes_the_engines_name(cluster: Any, path: str) -> None:
    engine = await cluster.engine()
    door = await cluster.door([engine])
    assert (await door.client.post(path, json={"model": "alias", **BODIES[path]})).status_code == 200
    assert engine.received[0].document == {"model": cluster.MODEL, **BODIES[path]}


@pytest.mark.parametrize(
    ("path", "fields", "param", "says"),
    [
        ("/v1/responses", {"input": None}, "input", "missing"),
        ("/v1/responses", {"input": ""}, "input", "empty"),
        ("/v1/responses", {"input": 5}, "input", "an integer"),
        ("/v1/responses", {"input": ["x"]}, "input[0]", "object"),
        ("/v1/responses", {"instructions": 1}, "instructions", "string"),
        ("/v1/responses", {"max_output_tokens": 0}, "max_output_tokens", "at least 1"),
        ("/v1/responses", {"stream": 1}, "stream", "true or false"),
        ("/v1/embeddings", {"input": None}, "input", "missing"),
        ("/v1/embeddings", {"input": []}, "input", "empty"),
        ("/v1/embeddings", {"input": {"a": 1}}, "input", "an object"),
        ("/v1/rerank", {"query": None}, "query", "missing"),
        ("/v1/rerank", {"query": 3}, "query", "an integer"),
        ("/rerank", {"documents": "x"}, "documents", "a string"),
        ("/rerank", {"documents": []}, "documents", "empty"),
        ("/v1/score", {"text_1": None, "text_2": None}, "text_1", "text_1 and text_2"),
        ("/v1/score", {"text_2": None}, "text_2", "missing"),
        ("/score", {"items": 4}, "items", "an integer"),
        ("/inference/v1/generate", {"token_ids": None}, "token_ids", "missing"),
        ("/inference/v1/generate", {"token_ids": []}, "token_ids", "empty"),
        ("/inference/v1/generate", {"token_ids": "hi"}, "token_ids", "a string"),
        ("/inference/v1/generate", {"sampling_params": None}, "sampling_params", "not null"),
        ("/inference/v1/generate", {"sampling_params": {"max_tokens": "x"}}, "max_tokens", "a string"),
        ("/generate", {"input_ids": None}, "text", "neither"),
        ("/generate", {"text": "hi"}, "text", "text and input_ids"),
        ("/generate", {"input_ids": []}, "input_ids", "empty"),
        ("/generate", {"sampling_params": 3}, "sampling_params", "an integer"),
        ("/generate", {"stream": "yes"}, "stream", "true or false"),
        ("/generate", {"model": ""}, "model", "is empty"),
        ("/tokenize", {"prompt": None}, "prompt", "missing"),
        ("/tokenize", {"prompt": [1]}, "prompt", "a list"),
        ("/tokenize", {"prompt": None, "messages": [1]}, "messages[0]", "role"),
        ("/detokenize", {"tokens": None}, "tokens", "missing"),
        ("/detokenize", {"tokens": "x"}, "tokens", "a string"),
        ("/detokenize", {"tokens": [1, -2]}, "tokens[1]", "token id"),
        ("/detokenize", {"model": None}, "model", "not null"),
    ],
)
async def test_malformed_bodies_name_the_field(
    cluster: Any, path: str, fields: dict[str, Any], param: str, says: str
) -> None:
    engine = await cluster.engine()
    door = await cluster.door([engine])
    response = await door.client.post(path, json={"model": cluster.MODEL, **BODIES[path], **fields})
    error = response.json()["error"]
    assert (response.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert says in error["message"]
    assert not engine.received


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"max_tokens": None}, "'max_tokens' is missing"),
        ({"max_tokens": 0}, "'max_tokens' must be at least 1"),
        ({"messages": []}, "'messages' is empty"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0]"),
        ({"system": 5}, "'system' must be a string or a list"),
        ({"stream": "x"}, "'stream'"),
    ],
)
async def test_malformed_messages_are_refused_in_anthropics_envelope(
    cluster: Any, fields: dict[str, Any], says: str
) -> None:
    door = await cluster.door([await cluster.engine()])
    body = {"model": cluster.MODEL, **BODIES["/v1/messages"], **fields}
    response = await door.client.post("/v1/messages", json=body)
    document = response.json()
    assert response.status_code == 400
    assert document["type"] == "error"
    assert document["error"]["type"] == "invalid_request_error"
    assert says in document["error"]["message"]
    assert document["request_id"] == response.headers["x-request-id"]


@pytest.mark.parametrize("path", BODIES)
async def test_an_unknown_model_is_told_in_the_style_of_the_api(cluster: Any, path: str) -> None:
    door = await cluster.door([await cluster.engine()])
    response = await door.client.post(path, json={**BODIES[path], "model": "nope"})
    document = response.json()
    assert response.status_code == 404
    assert cluster.MODEL in document["error"]["message"]
    if path == "/v1/messages":
        assert (document["type"], document["error"]["type"]) == ("error", "not_found_error")
    else:
        assert (document["error"]["code"], document["error"]["param"]) == ("model_not_found", "model")


@pytest.mark.parametrize(
    ("status", "kind"), [(429, "rate_limit_error"), (413, "request_too_large"), (502, "api_error")]
)
async def test_anthropics_types_of_errors(
    cluster: Any, monkeypatch: pytest.MonkeyPatch, status: int, kind: str
) -> None:
    async def fail(request: Any, writer: asyncio.StreamWriter) -> None:
        writer.write(cluster.json_response(b"{}", status="500 Broken"))

    door = await cluster.door([await cluster.engine(respond=fail)], max_body_bytes=1000, max_attempts=1)
    if status == 429:

        def full(request: Any, now_s: float) -> None:
            raise RejectedError("full", "queue", 3.0)

        monkeypatch.setattr(door.placements, "place", full)
    system = "x" * 2_000 if status == 413 else "x"
    body = {"model": cluster.MODEL, **BODIES["/v1/messages"], "system": system}
    response = await door.client.post("/v1/messages", json=body)
    assert (response.status_code, response.json()["error"]["type"]) == (status, kind)
    assert response.headers.get("retry-after") == ("3" if status == 429 else None)


def numbered(number: int) -> bytes:
    document = {"type": "response.output_text.delta", "sequence_number": number, "delta": "x"}
    return b"event: response.output_text.delta\ndata: " + orjson.dumps(document) + b"\n\n"


async def test_broken_stream_of_responses_ends_with_a_numbered_error_event(cluster: Any) -> None:
    async def die(request: Any, writer: asyncio.StreamWriter) -> None:
        writer.write(cluster.STREAM_HEAD + cluster.chunk(numbered(6)) + cluster.chunk(numbered(7)))
        writer.write(cluster.chunk(numbered(8))[:-9])
        await writer.drain()
        writer.close()

    door = await cluster.door([await cluster.engine("dying", die)])
    async with openai.AsyncOpenAI(base_url=f"{door.server.url}/v1", api_key="k", max_retries=0) as client:
        stream = await client.responses.create(model=cluster.MODEL, input="hi", stream=True)
        events: list[Any] = [event async for event in stream]
    assert [event.sequence_number for event in events] == [6, 7, 8]
    assert (events[-1].type, events[-1].code) == ("error", "stream_interrupted")
    assert "'dying'" in events[-1].message
    assert door.placements.open_placements == 0


async def test_broken_stream_of_messages_ends_with_an_error_event(cluster: Any) -> None:
    event = b'event: ping\ndata: {"type": "ping"}\n\n'

    async def die(request: Any, writer: asyncio.StreamWriter) -> None:
        writer.write(cluster.STREAM_HEAD + cluster.chunk(event))
        await writer.drain()
        writer.close()

    door = await cluster.door([await cluster.engine("dying", die)])
    body = {"model": cluster.MODEL, **BODIES["/v1/messages"], "stream": True}
    text = (await door.client.post("/v1/messages", json=body)).content
    assert text.startswith(event)
    name, data = text[len(event) :].removesuffix(b"\n\n").split(b"\n")
    assert name == b"event: error"
    document = orjson.loads(data.removeprefix(b"data: "))
    assert (document["type"], document["error"]["type"]) == ("error", "api_error")
    assert "'dying'" in document["error"]["message"]


@pytest.mark.parametrize(
    ("path", "usage", "learned"),
    [
        (
            "/v1/responses",
            b'{"input_tokens":9,"input_tokens_details":{"cached_tokens":4},"output_tokens":3}',
            Usage(9, 3, 4),
        ),
        ("/v1/messages", b'{"input_tokens":9,"output_tokens":3}', Usage(9, 3, None)),
        (
            "/v1/messages",
            b'{"cache_read_input_tokens":16,"cache_creation_input_tokens":2,"input_tokens":9,"output_tokens":3}',
            Usage(27, 3, 16),
        ),
        ("/v1/embeddings", b'{"prompt_tokens":9,"completion_tokens":0}', Usage(9, 0, None)),
    ],
)
async def test_usage_is_read_in_the_words_of_the_api(
    cluster: Any, path: str, usage: bytes, learned: Usage
) -> None:
    async def respond(request: Any, writer: asyncio.StreamWriter) -> None:
        if request.document.get("stream"):
            last = b'event: x\ndata: {"type":"x","response":{"usage":%b,"user":null}}\n\n' % usage
            writer.write(cluster.STREAM_HEAD + cluster.chunk(numbered(1)) + cluster.chunk(last))
            writer.write(cluster.chunk(b"event: message_stop\ndata: {}\n\n") + b"0\r\n\r\n")
        else:
            writer.write(cluster.json_response(b'{"text":"\\"usage\\":{","usage":%b,"x":1}' % usage))

    door = await cluster.door([await cluster.engine(respond=respond)])
    for stream in (False, True):
        body = {"model": cluster.MODEL, **BODIES[path], "stream": stream}
        assert (await door.client.post(path, json=body)).status_code == 200
    assert door.placements.named("finished") == [learned, learned]


async def test_usage_is_read_wherever_a_proxy_cut_it(cluster: Any) -> None:
    last = b'data: {"choices":[],"usage":{"prompt_tokens":123,"completion_tokens":45}}\n\n'

    async def respond(request: Any, writer: asyncio.StreamWriter) -> None:
        payload, cut = numbered(1) + last, request.document["seed"]
        writer.write(cluster.STREAM_HEAD + cluster.chunk(payload[:cut]))
        writer.write(cluster.chunk(payload[cut:]) + cluster.chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")

    door = await cluster.door([await cluster.engine(respond=respond)])
    cuts = range(len(numbered(1)) + 1, len(numbered(1) + last) - 2)
    for cut in cuts:
        await door.chat(stream=True, seed=cut)
    assert door.placements.named("finished") == [Usage(123, 45)] * len(cuts)


async def test_streams_without_usage_are_counted_where_an_event_is_a_token(cluster: Any) -> None:
    async def respond(request: Any, writer: asyncio.StreamWriter) -> None:
        writer.write(
            cluster.STREAM_HEAD + b"".join(cluster.chunk(numbered(i)) for i in range(9)) + b"0\r\n\r\n"
        )

    door = await cluster.door([await cluster.engine(respond=respond)])
    for path, body in {"/v1/responses": BODIES["/v1/responses"], "/v1/completions": {"prompt": "x"}}.items():
        await door.client.post(path, json={"model": cluster.MODEL, "stream": True, **body})
    assert [usage.output_tokens for usage in door.placements.named("finished")] == [None, 8]


class Words:
    """A tokenizer that shows the document it was given."""

    plain = None

    def __init__(self) -> None:
        self.documents: list[dict[str, Any]] = []

    def tokens(self, request: Any) -> Any:
        import numpy as np

        self.documents.append(request.document)
        return np.arange(len(self.documents) + 4, dtype=np.uint32)


TOOL = {"type": "object", "properties": {}}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
THOUGHT = {"reasoning": "hm", "reasoning_content": "hm"}


@pytest.mark.parametrize(
    ("path", "body", "chat"),
    [
        (
            "/v1/responses",
            {"input": "hi", "instructions": "Be brief."},
            {"messages": [{"role": "system", "content": "Be brief."}, USER]},
        ),
        (
            "/v1/responses",
            {
                "input": [
                    {"role": "developer", "content": [{"type": "input_text", "text": "a"}]},
                    {"type": "message", **USER},
                    {
                        "type": "reasoning",
                        "summary": [],
                        "content": [{"type": "reasoning_text", "text": "hm"}],
                    },
                    {
                        "type": "message",
                        "role": "assistant",
                        "content": [{"type": "output_text", "text": "ok"}],
                    },
                    {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a": 1}'},
                    {"type": "function_call_output", "call_id": "c1", "output": "3"},
                ],
                "tools": [{"type": "function", "name": "f", "parameters": TOOL, "strict": True}],
            },
            {
                "messages": [
                    {"role": "developer", "content": [{"type": "text", "text": "a"}]},
                    USER,
                    {"role": "assistant", **THOUGHT, "content": "ok", "tool_calls": [CALL]},
                    {"role": "tool", "tool_call_id": "c1", "content": "3"},
                ],
                "tools": [
                    {
                        "type": "function",
                        "function": {"name": "f", "description": None, "parameters": TOOL, "strict": True},
                    }
                ],
            },
        ),
        (
            "/v1/messages",
            {
                "max_tokens": 5,
                "system": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}],
                "messages": [
                    {"role": "user", "content": [{"type": "text", "text": "hi"}]},
                    {
                        "role": "assistant",
                        "content": [
                            {"type": "thinking", "thinking": "hm", "signature": "s"},
                            {"type": "text", "text": "ok"},
                            {"type": "tool_use", "id": "c1", "name": "f", "input": {"a": 1}},
                        ],
                    },
                    {
                        "role": "user",
                        "content": [
                            {"type": "text", "text": "there"},
                            {"type": "tool_result", "tool_use_id": "c1", "content": "3"},
                        ],
                    },
                ],
                "tools": [{"name": "f", "description": "d", "input_schema": {"properties": {}}}],
            },
            {
                "messages": [
                    {"role": "system", "content": "Be brief."},
                    USER,
                    {"role": "assistant", **THOUGHT, "tool_calls": [CALL], "content": "ok"},
                    {"role": "tool", "tool_call_id": "c1", "content": "3"},
                    {"role": "user", "content": "there"},
                ],
                "tools": [
                    {"type": "function", "function": {"name": "f", "description": "d", "parameters": TOOL}}
                ],
            },
        ),
    ],
)
async def test_placement_sees_the_chat_that_the_engine_will_make(
    cluster: Any, path: str, body: dict[str, Any], chat: dict[str, Any]
) -> None:
    words = Words()
    door = await cluster.door([await cluster.engine()], tokens=TokenService({"*": words}))  # type: ignore[dict-item]
    response = await door.client.post(path, json={"model": cluster.MODEL, **body})
    assert response.status_code == 200
    assert words.documents == [chat]
    asked = door.placements.asked[0]
    assert (asked.prompt_tokens, asked.token_source, asked.route) == (5, TokenSource.LOCAL, path)


@pytest.mark.parametrize(
    ("path", "fields", "why"),
    [
        ("/v1/responses", {"previous_response_id": "resp_1"}, "previous_response_id"),
        ("/v1/responses", {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input_image"),
        ("/v1/responses", {"input": [{"type": "item_reference", "id": "x"}]}, "item_reference"),
        ("/v1/responses", {"tools": [{"type": "web_search"}]}, "web_search"),
        ("/v1/responses", {"tools": 5}, "int"),
        (
            "/v1/messages",
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "image",
        ),
        ("/v1/messages", {"tools": [{"type": "bash", "name": "bash"}]}, "input_schema"),
        ("/v1/rerank", {}, None),
        ("/v1/embeddings", {}, None),
    ],
)
async def test_what_cannot_be_rendered_is_placed_by_load_and_says_so(
    cluster: Any, path: str, fields: dict[str, Any], why: str | None
) -> None:
    engine = await cluster.engine()
    door = await cluster.door([engine], tokens=TokenService({"*": Words()}))  # type: ignore[dict-item]
    body = {"model": cluster.MODEL, **BODIES[path], **fields}
    assert (await door.client.post(path, json=body)).status_code == 200
    assert engine.received[0].document == body
    asked = door.placements.asked[0]
    assert (len(asked.tokens), asked.token_source) == (0, TokenSource.NONE)
    assert asked.prompt_tokens >= 1
    assert door.sample("conductor_token_source_total", source="none") == 1
    assert door.sample("conductor_tokenization_failures_total", source="local") == (why is not None)
    if why is None:
        assert asked.token_fallback is None
    else:
        assert asked.token_fallback.startswith("local: ") and why in asked.token_fallback


async def test_a_client_may_name_the_kind_of_work(cluster: Any) -> None:
    engine = await cluster.engine()
    door = await cluster.door([engine])
    body = {"model": cluster.MODEL, "messages": [USER]}
    headers = {"x-conductor-route": "agent-step"}
    assert (await door.client.post("/v1/chat/completions", json=body, headers=headers)).status_code == 200
    assert door.placements.asked[0].route == "agent-step"
    assert engine.received[0].header("x-conductor-route") is None


async def test_embeddings_of_token_ids_are_placed_by_them(cluster: Any) -> None:
    door = await cluster.door([await cluster.engine()])
    for given in ([5, 6, 7], [[5, 6, 7], [8]]):
        await door.client.post("/v1/embeddings", json={"model": cluster.MODEL, "input": given})
    assert [asked.tokens.tolist() for asked in door.placements.asked] == [[5, 6, 7]] * 2
    assert {asked.token_source for asked in door.placements.asked} == {TokenSource.CLIENT}
    assert {asked.max_output_tokens for asked in door.placements.asked} == {1}


async def test_tokenization_reserves_nothing_and_moves_on_when_an_instance_fails(cluster: Any) -> None:
    async def fail(request: Any, writer: asyncio.StreamWriter) -> None:
        writer.write(cluster.json_response(b"{}", status="500 Broken"))

    good = await cluster.engine("good")
    door = await cluster.door([await cluster.engine("bad", fail), good])
    response = await door.client.post("/tokenize", json={"model": cluster.MODEL, "prompt": "x"})
    assert response.status_code == 200
    assert response.headers["x-conductor-decode-instance"] == "good"
    assert "x-conductor-placement-id" not in response.headers
    assert not door.placements.named("place")
    assert [failure.instance_id for failure in door.placements.named("failed")] == ["bad"]
    assert door.sample("conductor_prompt_tokens_total") == 0


async def test_pooling_runs_on_the_prefill_instance_alone(cluster: Any) -> None:
    prefill, decode = await cluster.engine("prefill"), await cluster.engine("decode")
    door = await cluster.door([prefill], [decode])
    response = await door.client.post("/v1/embeddings", json={"model": cluster.MODEL, "input": "x"})
    assert response.headers["x-conductor-decode-instance"] == "prefill"
    assert (len(prefill.received), len(decode.received)) == (1, 0)
    assert "kv_transfer_params" not in prefill.received[0].document


@pytest.mark.parametrize(
    ("path", "limit"), [("/v1/responses", "max_output_tokens"), ("/v1/messages", "max_tokens")]
)
async def test_the_hand_off_speaks_the_api_of_the_request(cluster: Any, path: str, limit: str) -> None:
    prefill, decode = await cluster.engine("prefill"), await cluster.engine("decode")
    door = await cluster.door([prefill], [decode])
    body = {"model": cluster.MODEL, **BODIES[path], limit: 50, "stream": True}
    response = await door.client.post(path, json=body)
    assert response.status_code == 200
    first, second = prefill.received[0], decode.received[0]
    assert first.request_line == second.request_line == f"POST {path} HTTP/1.1"
    assert (first.document[limit], first.document["stream"]) == (1, False)
    assert first.document["kv_transfer_params"]["do_remote_decode"] is True
    assert second.document == {**body, "kv_transfer_params": orjson.loads(cluster.TRANSFER)}
    assert door.placements.named("finished")[0].cached_tokens == 8


def test_the_view_keeps_the_clients_own_words_of_the_template() -> None:
    from router.inference import Endpoint, parse_inference

    body = orjson.dumps(
        {"model": "m", "input": "hi", "chat_template_kwargs": {"thinking": False}, "cache_salt": "s"}
    )
    request = parse_inference(Endpoint.RESPONSES, body)
    view = placement_view(request)
    assert view == replace(
        request,
        endpoint=Endpoint.CHAT,
        parsed={"messages": [USER], "chat_template_kwargs": {"thinking": False}},
    )
