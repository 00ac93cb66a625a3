"""Completion prompts that reach engines as token ids."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from router import PromptTokenizer, TokenService
from simulator.emulator.tokens import TOKENIZER_FOLDER

TEXT = "The cache that was warm yesterday is cold today, and nobody noticed."


@pytest.fixture(scope="module")
def tokenizer() -> PromptTokenizer:
    return PromptTokenizer.from_folder(TOKENIZER_FOLDER)


async def asked(door: Any, body: bytes, path: str = "/v1/completions") -> None:
    response = await door.client.post(path, content=body)
    assert response.status_code == 200


def completion(cluster: Any, **fields: Any) -> dict[str, Any]:
    return {"model": cluster.MODEL, "prompt": TEXT, "temperature": 0.25, "stop": ["\u00e9"], **fields}


@pytest.mark.parametrize("disaggregated", [False, True])
async def test_the_engine_gets_the_ids(cluster: Any, tokenizer: PromptTokenizer, disaggregated: bool) -> None:
    engines = [await cluster.engine("e0"), await cluster.engine("e1")]
    door = await cluster.door(
        engines[:1],
        engines[1:] if disaggregated else None,
        tokens=TokenService({"*": tokenizer}),
        pass_tokens=frozenset((cluster.MODEL,)),
    )
    document = completion(cluster, max_tokens=9)
    await asked(door, orjson.dumps(document))
    ids = tokenizer.encode(TEXT, add_special_tokens=True).tolist()
    assert door.placements.asked[0].tokens.tolist() == ids
    received = engines[0].received[0].document
    assert received["prompt"] == ids
    if disaggregated:
        received = engines[1].received[0].document
        assert received.pop("kv_transfer_params") == orjson.loads(cluster.TRANSFER)
    assert received == {**document, "prompt": ids}
    assert door.sample("conductor_prompts_passed_as_tokens_total") == 1


@pytest.mark.parametrize(
    "fields",
    [
        {"echo": True},
        {"suffix": "end"},
        {"prompt_logprobs": 1},
        {"truncate_prompt_tokens": 5},
        {"prompt": [TEXT]},
        {"prompt": [TEXT, "other"]},
        {"prompt": [5, 6, 7]},
    ],
)
async def test_bodies_pass_as_they_are_where_the_text_is_needed(
    cluster: Any, tokenizer: PromptTokenizer, fields: dict[str, Any]
) -> None:
    engine = await cluster.engine()
    settings = {"tokens": TokenService({"*": tokenizer}), "pass_tokens": frozenset((cluster.MODEL,))}
    door = await cluster.door([engine], **settings)
    body = orjson.dumps(completion(cluster, **fields), option=orjson.OPT_INDENT_2)
    await asked(door, body)
    assert engine.received[0].body == body
    assert door.sample("conductor_prompts_passed_as_tokens_total") == 0


async def test_chats_and_other_models_pass_as_they_are(cluster: Any, tokenizer: PromptTokenizer) -> None:
    engine = await cluster.engine()
    settings = {"tokens": TokenService({"*": tokenizer}), "pass_tokens": frozenset((cluster.MODEL,))}
    door = await cluster.door([engine], **settings)
    body = orjson.dumps(cluster.chat_document(), option=orjson.OPT_INDENT_2)
    await asked(door, body, "/v1/chat/completions")
    await asked(door, orjson.dumps(completion(cluster, model="alias")))
    assert engine.received[0].body == body
    assert engine.received[1].document["prompt"] == TEXT


async def test_without_a_tokenizer_the_text_passes(cluster: Any) -> None:
    engine = await cluster.engine()
    door = await cluster.door([engine], pass_tokens=frozenset((cluster.MODEL,)))
    body = orjson.dumps(completion(cluster))
    await asked(door, body)
    assert engine.received[0].body == body
