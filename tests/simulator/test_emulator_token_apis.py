"""The emulated engine's own APIs, from tokens to tokens."""

from itertools import pairwise
from typing import Any

import orjson
import pytest

PROMPT = list(range(300, 400))


def completion(engine: Any, **fields: Any) -> dict[str, Any]:
    body = {"prompt": PROMPT, "max_tokens": 12, **fields}
    return engine.http.post("/v1/completions", json=body).json()


def generate(engine: Any, path: str, **fields: Any) -> Any:
    answer = engine.http.post(path, json=fields)
    assert answer.status_code == 200, answer.text
    return answer.json() if not fields.get("stream") else events(answer.text)


def events(text: str) -> list[Any]:
    lines = text.removesuffix("\n\n").split("\n\n")
    assert lines.pop() == "data: [DONE]"
    return [orjson.loads(line.removeprefix("data: ")) for line in lines]


def test_vllms_ids_are_those_of_the_text(engine: Any) -> None:
    text = completion(engine)["choices"][0]["text"]
    asked = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 12}}
    whole = generate(engine, "/inference/v1/generate", **asked)
    [choice] = whole["choices"]
    assert engine.http.post("/detokenize", json={"tokens": choice["token_ids"]}).json()["prompt"] == text
    assert whole["usage"]["completion_tokens"] == len(choice["token_ids"]) == 12
    assert whole["usage"]["prompt_tokens_details"]["cached_tokens"] == 96
    streamed = generate(
        engine,
        "/inference/v1/generate",
        **asked,
        model=engine.model,
        stream=True,
        stream_options={"include_usage": True},
    )
    assert streamed.pop()["usage"]["prompt_tokens"] == len(PROMPT)
    ids = [token for event in streamed for token in event["choices"][0]["token_ids"]]
    assert ids == choice["token_ids"]
    assert [event["choices"][0]["finish_reason"] for event in streamed][-1] == "length"


def test_sglangs_text_grows(engine: Any) -> None:
    expected = completion(engine)["choices"][0]["text"]
    asked = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 12, "temperature": 0}}
    whole = generate(engine, "/generate", **asked)
    meta = whole["meta_info"]
    assert (whole["text"], len(whole["output_ids"])) == (expected, 12)
    assert meta["finish_reason"] == {"type": "length", "length": 12}
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (100, 12, 96)
    streamed = generate(engine, "/generate", **asked, stream=True)
    assert streamed[-1] == {**whole, "meta_info": {**meta, "id": streamed[-1]["meta_info"]["id"]}}
    texts = [event["text"] for event in streamed]
    assert all(later.startswith(earlier) for earlier, later in pairwise(texts))


def test_sglangs_text_and_its_ids_are_one_prompt(engine: Any) -> None:
    text = "What is in the cache?"
    ids = engine.http.post("/tokenize", json={"prompt": text}).json()["tokens"]
    by_text, by_ids = (
        generate(engine, "/generate", **prompt) for prompt in ({"text": text}, {"input_ids": ids})
    )
    assert by_text["output_ids"] == by_ids["output_ids"]


@pytest.mark.parametrize(
    ("path", "fields", "says"),
    [
        ("/inference/v1/generate", {"token_ids": [1]}, "sampling_params"),
        ("/inference/v1/generate", {"token_ids": [1 << 30], "sampling_params": {}}, "out of vocabulary"),
        ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {}, "model": "x"}, "does not exist"),
        ("/generate", {}, "Either text or input_ids"),
        ("/generate", {"input_ids": [1 << 30]}, "out of vocabulary"),
        ("/generate", {"text": "x", "sampling_params": {"n": 2}}, "one answer"),
    ],
)
def test_what_is_refused(engine: Any, path: str, fields: dict[str, Any], says: str) -> None:
    answer = engine.http.post(path, json=fields)
    assert answer.status_code in (400, 404)
    assert says in answer.json()["error"]["message"]
