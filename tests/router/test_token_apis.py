"""Engines' own APIs, from tokens to tokens: vLLM's /inference/v1/generate and SGLang's /generate."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import orjson
import pytest

from conductor.placement import ModelCard, Target, TokenSource, Usage
from router import PromptTokenizer, TokenService
from router.disaggregation import JointHandoff, handoff_protocol
from router.inference import Endpoint, parse_inference
from router.usage import usage_from_tail
from simulator.emulator.tokens import TOKENIZER_FOLDER

TOKENS, GENERATE = "/inference/v1/generate", "/generate"
IDS = [5, 6, 7]
BODIES: dict[str, dict[str, Any]] = {
    TOKENS: {"token_ids": IDS, "sampling_params": {"max_tokens": 9, "extra_args": {"mine": 1}}},
    GENERATE: {"input_ids": IDS, "sampling_params": {"max_new_tokens": 9}},
}


@pytest.fixture(scope="module")
def tokenizer() -> PromptTokenizer:
    return PromptTokenizer.from_folder(TOKENIZER_FOLDER)


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("named", [False, True])
async def test_ids_place_the_request_and_the_body_is_not_touched(
    cluster: Any, path: str, named: bool
) -> None:
    engine = await cluster.engine()
    door = await cluster.door([engine])
    body = orjson.dumps({**({"model": cluster.MODEL} if named else {}), **BODIES[path], "extra": 1})
    response = await door.client.post(path, content=body)
    assert response.status_code == 200
    assert (engine.received[0].request_line, engine.received[0].body) == (f"POST {path} HTTP/1.1", body)
    asked = door.placements.asked[0]
    assert (asked.tokens.tolist(), asked.token_source) == (IDS, TokenSource.CLIENT)
    assert (asked.model, asked.max_output_tokens, asked.route) == (cluster.MODEL, 9, path)


@pytest.mark.parametrize(
    ("served", "status", "says"),
    [
        ([ModelCard("test/model", 9, 1), ModelCard("tuned", 9, 1, parent="test/model")], 200, ""),
        ([ModelCard("test/model", 9, 1), ModelCard("other", 9, 1)], 400, "Served models: other, test/model"),
        ([], 503, "No instance is up yet"),
    ],
)
async def test_the_model_must_be_named_where_there_is_not_one(
    cluster: Any, monkeypatch: pytest.MonkeyPatch, served: list[ModelCard], status: int, says: str
) -> None:
    door = await cluster.door([await cluster.engine()])
    monkeypatch.setattr(door.placements, "models", lambda: served)
    for _ in range(2):
        response = await door.client.post(GENERATE, json=BODIES[GENERATE])
        assert response.status_code == status
        assert status == 200 or says in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "tokens"),
    [
        ({"input_ids": [[1, 2], [3]]}, [1, 2]),
        ({"input_ids": [1, "x"]}, None),
        ({"input_ids": IDS, "sampling_params": [{"max_new_tokens": 4}]}, IDS),
        ({"input_ids": IDS, "sampling_params": []}, IDS),
        ({"input_ids": IDS, "lora_path": "adapter"}, None),
        ({"input_ids": IDS, "extra_key": "mine"}, None),
        ({"input_ids": IDS, "image_data": ["x"]}, None),
        ({"input_embeds": [[0.5]]}, None),
    ],
)
async def test_what_more_a_prompt_may_be(
    cluster: Any, fields: dict[str, Any], tokens: list[int] | None
) -> None:
    door = await cluster.door([await cluster.engine()])
    assert (await door.client.post(GENERATE, json=fields)).status_code == 200
    asked = door.placements.asked[0]
    if tokens is None:
        assert (len(asked.tokens), asked.token_source) == (0, TokenSource.NONE)
        assert asked.token_fallback
    else:
        assert (asked.tokens.tolist(), asked.token_fallback) == (tokens, None)
        limit = (fields.get("sampling_params") or [{}])[0].get("max_new_tokens")
        assert asked.max_output_tokens == (128 if limit is None else limit)  # SGLang's default


async def test_text_is_tokenized_and_may_be_passed_as_ids(cluster: Any, tokenizer: PromptTokenizer) -> None:
    engine = await cluster.engine()
    door = await cluster.door(
        [engine], tokens=TokenService({"*": tokenizer}), pass_tokens=frozenset((cluster.MODEL,))
    )
    text = "The cache that was warm yesterday is cold today."
    assert (await door.client.post(GENERATE, json={"text": text, "rid": "r"})).status_code == 200
    ids = tokenizer.encode(text, add_special_tokens=True).tolist()
    assert door.placements.asked[0].tokens.tolist() == ids
    assert engine.received[0].document == {"rid": "r", "input_ids": ids}


async def test_vllms_engines_hand_over(cluster: Any) -> None:
    prefill, decode = await cluster.engine("prefill"), await cluster.engine("decode")
    door = await cluster.door([prefill], [decode])
    body = {**BODIES[TOKENS], "stream": True, "stream_options": {"include_usage": True}}
    body["sampling_params"] = {**body["sampling_params"], "min_tokens": 3}
    assert (await door.client.post(TOKENS, json=body)).status_code == 200
    first, second = prefill.received[0].document, decode.received[0].document
    asked = first.pop("sampling_params")
    assert asked["extra_args"].pop("kv_transfer_params")["do_remote_decode"] is True
    assert asked == {"max_tokens": 1, "extra_args": {"mine": 1}}
    assert first == {"model": cluster.MODEL, "token_ids": IDS, "stream": False}
    params = second["sampling_params"]["extra_args"].pop("kv_transfer_params")
    assert params == orjson.loads(cluster.TRANSFER)
    assert second == {**body, "model": cluster.MODEL}
    assert door.placements.named("finished")[0].cached_tokens == 8


async def test_several_answers_are_not_handed_over(cluster: Any) -> None:
    prefill, decode = await cluster.engine("prefill"), await cluster.engine("decode")
    door = await cluster.door([prefill], [decode])
    body = {"token_ids": IDS, "sampling_params": {"n": 2}}
    assert (await door.client.post(TOKENS, json=body)).status_code == 200
    assert (len(prefill.received), decode.received[0].document) == (0, body)


@pytest.mark.parametrize(("prompts", "rooms"), [({"text": ["a", "b"]}, 2), ({"input_ids": IDS}, None)])
def test_sglangs_engines_meet_in_rooms(prompts: dict[str, Any], rooms: int | None) -> None:
    target = replace(Target("p", "http://h:1", "h", 1), protocol="sglang")
    handoff = handoff_protocol("sglang").begin(target)
    assert isinstance(handoff, JointHandoff)
    request = parse_inference(Endpoint.GENERATE, orjson.dumps(prompts), lambda: "m")
    room = orjson.loads(handoff.body(request, "m"))["bootstrap_room"]
    assert isinstance(room, int) if rooms is None else len(room) == rooms


def test_sglangs_usage_behind_log_probabilities() -> None:
    logprobs = b",".join(b"[-1.5,%d,null]" % token for token in range(4_000))
    meta = b'"meta_info":{"prompt_tokens":9,"output_token_logprobs":[%b],' % logprobs
    counts = b'"completion_tokens":4000,"cached_tokens":8}}'
    assert usage_from_tail(meta + counts) == Usage(None, 4_000, 8)


async def test_sglangs_usage_is_read(cluster: Any) -> None:
    meta = b'"meta_info":{"id":"x","finish_reason":null,"prompt_tokens":9,"completion_tokens":3,"cached_tokens":4}'

    async def respond(request: Any, writer: Any) -> None:
        if request.document.get("stream"):
            first = b'data: {"text":"a","meta_info":{"prompt_tokens":9,"completion_tokens":1}}\n\n'
            writer.write(cluster.STREAM_HEAD + cluster.chunk(first))
            writer.write(cluster.chunk(b'data: {"text":"abc",%b}\n\n' % meta))
            writer.write(cluster.chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
        else:
            writer.write(cluster.json_response(b'{"text":"abc","output_ids":[1,2,3],%b}' % meta))

    door = await cluster.door([await cluster.engine(respond=respond)])
    for stream in (False, True):
        response = await door.client.post(GENERATE, json={**BODIES[GENERATE], "stream": stream})
        assert response.status_code == 200
    assert door.placements.named("finished") == [Usage(9, 3, 4)] * 2
