"""Hand-off between context and generation servers of TensorRT-LLM."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conductor.placement import Target
from router import HandoffError, handoff_protocol
from router.inference import Endpoint, parse_inference

TRTLLM = handoff_protocol("trtllm").begin(Target("p", "http://p:1", "p", 1))
PARAMS = (
    b'{ "request_type":"context_only","first_gen_tokens":[9707],"ctx_request_id":9223372036854775807,'
    b'"encoded_opaque_state":"AAEC\\/w==","draft_tokens":null,"disagg_request_id":4398046511105}'
)
FOR_GENERATION = (
    b'{"request_type":"generation_only","first_gen_tokens":[9707],"ctx_request_id":9223372036854775807,'
    b'"encoded_opaque_state":"AAEC\\/w==","draft_tokens":null,"disagg_request_id":4398046511105}'
)


def context_answer(params: bytes = PARAMS, finish_reason: str = "length") -> bytes:
    return (
        b'{"id":"cmpl-1","choices":[{"index":0,"text":"Hello","finish_reason":"%b","disaggregated_params":%b}],'
        b'"usage":{"prompt_tokens":12,"completion_tokens":1,"prompt_tokens_details":{"cached_tokens":7}}}'
        % (finish_reason.encode(), params)
    )


async def pair(cluster: Any, answer: bytes = context_answer()) -> tuple[Any, Any, Any]:
    """Front door, context server and generation server."""

    async def respond(request: Any, writer: asyncio.StreamWriter) -> None:
        writer.write(cluster.json_response(answer))

    context, generation = await cluster.engine("context", respond), await cluster.engine("generation")
    targets = [replace(engine.target, protocol="trtllm") for engine in (context, generation)]
    return await cluster.door(targets[:1], targets[1:]), context, generation


@pytest.mark.parametrize("stream", [False, True])
async def test_the_context_servers_parameters_reach_the_generation_server(cluster: Any, stream: bool) -> None:
    door, context, generation = await pair(cluster)
    fields = {"stream": stream, "max_completion_tokens": 50, "stream_options": {"include_usage": True}}
    body = orjson.dumps(cluster.chat_document(**fields), option=orjson.OPT_INDENT_2)
    response = await door.client.post("/v1/chat/completions", content=body)
    assert response.status_code == 200
    asked = context.received[0].document
    assert asked.pop("disaggregated_params").keys() == {"request_type", "disagg_request_id"}
    assert asked == cluster.chat_document(stream=False, max_tokens=1)
    assert generation.received[0].body == b'{"disaggregated_params":' + FOR_GENERATION + b"," + body[1:]
    calls = [name for name, _ in door.placements.calls]
    assert calls == ["place", "prefill_finished", *["first_token"] * stream, "finished"]
    assert door.placements.named("finished")[0].cached_tokens == 7
    assert door.sample("conductor_handoffs_without_transfer_total") == 0


@pytest.mark.parametrize(
    "answer", [context_answer(finish_reason="stop"), context_answer(b"null", "not_finished")]
)
async def test_without_kv_to_hand_over_the_generation_server_computes(cluster: Any, answer: bytes) -> None:
    door, context, generation = await pair(cluster, answer)
    assert (await door.chat()).status_code == 200
    assert len(context.received) == 1
    assert generation.received[0].document == cluster.chat_document()
    assert door.sample("conductor_handoffs_without_transfer_total") == 1


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": ["one", "two"]}),
        ("/v1/completions", {"prompt": [[1, 2], [3]]}),
        ("/v1/completions", {"prompt": "one", "best_of": 2}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "n": 2}),
        ("/v1/responses", {"input": "hi"}),
    ],
)
async def test_what_cannot_be_split_goes_to_the_generation_server(
    cluster: Any, path: str, fields: dict[str, Any]
) -> None:
    door, context, generation = await pair(cluster)
    body = orjson.dumps({"model": cluster.MODEL, **fields})
    assert (await door.client.post(path, content=body)).status_code == 200
    assert not context.received
    assert generation.received[0].body == body
    assert door.sample("conductor_handoffs_without_transfer_total") == 1
    assert [name for name, _ in door.placements.calls] == ["place", "finished"]


@pytest.mark.parametrize("prompt", ["one", ["one"], [1, 2, 3], [[1, 2, 3]]])
async def test_one_prompt_is_split_however_it_is_written(cluster: Any, prompt: Any) -> None:
    door, context, generation = await pair(cluster)
    document = {"model": cluster.MODEL, "prompt": prompt}
    assert (await door.client.post("/v1/completions", json=document)).status_code == 200
    assert context.received[0].document["prompt"] == prompt
    assert generation.received[0].document.pop("disaggregated_params")["request_type"] == "generation_only"


async def test_an_unreadable_answer_is_a_failure_of_the_context_server(cluster: Any) -> None:
    door, _, generation = await pair(cluster, b'{"choices":[]}')
    assert (await door.chat()).status_code == 503
    assert "context" in {failure.instance_id for failure in door.placements.named("failed")}
    assert not generation.received


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(), json_values))
def test_unknown_parameters_pass_unchanged(params: dict[str, Any]) -> None:
    answer = TRTLLM.prefill_answer(context_answer(orjson.dumps(params, option=orjson.OPT_INDENT_2)))
    assert answer.transfer is not None and answer.cached_tokens == 7
    assert orjson.loads(answer.transfer) == {**params, "request_type": "generation_only"}


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b'{"choices":[{"disaggregated_params":5}]}', b'{"choices":[{},{}]}', b'{"usage":{}}'],
)
def test_unreadable_answers(body: bytes) -> None:
    with pytest.raises(HandoffError):
        TRTLLM.prefill_answer(body)


def test_every_prefill_has_a_global_id_of_its_own() -> None:
    request = parse_inference(Endpoint.COMPLETIONS, b'{"model":"m","prompt":"hi"}')
    params = [orjson.loads(TRTLLM.prefill_body(request, "m"))["disaggregated_params"] for _ in range(100)]
    ids = {asked["disagg_request_id"] for asked in params}
    assert len(ids) == 100
    assert all(2**42 <= number < 2**63 for number in ids)
