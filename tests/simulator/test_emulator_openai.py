"""The OpenAI surface of a running emulator, mostly through the official client."""

import json
from typing import Any

import openai
import pytest

TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "search", "parameters": {"type": "object", "properties": {}}}},
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    },
]


def ask(client: openai.OpenAI, text: str, **options: Any) -> Any:
    messages = [{"role": "user", "content": text}]
    return client.chat.completions.create(model="emulated-model", messages=messages, **options)  # type: ignore[call-overload]


def test_a_chat_answer(client: openai.OpenAI) -> None:
    answer = ask(client, "Tell me something.")
    choice = answer.choices[0]
    assert choice.finish_reason == "stop"
    assert choice.message.role == "assistant"
    assert answer.usage.completion_tokens == len(choice.message.content.split()) + 1  # words and end of turn
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.id.startswith("chatcmpl-")


def test_a_stream_says_the_same(client: openai.OpenAI) -> None:
    whole = ask(client, "Tell me a story.")
    chunks = list(ask(client, "Tell me a story.", stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == (
        whole.choices[0].message.content
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == [
        "stop"
    ]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens
    assert len({c.id for c in chunks}) == 1


def test_usage_is_not_streamed_unasked(client: openai.OpenAI) -> None:
    assert all(chunk.usage is None for chunk in ask(client, "Tell me.", stream=True, max_tokens=3))


def test_every_turn_reuses_the_conversation(client: openai.OpenAI) -> None:
    messages: list[Any] = [{"role": "system", "content": "You are a patient teacher. " * 8}]
    known_tokens = 0
    for turn in range(4):
        messages.append({"role": "user", "content": f"Question {turn}?"})
        answer = client.chat.completions.create(model="emulated-model", messages=messages)
        assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
        # All of the last prompt and answer, but for the incomplete block and the token never computed.
        cached = answer.usage.prompt_tokens_details.cached_tokens
        assert cached == max(known_tokens - 1, 0) // 16 * 16
        known_tokens = answer.usage.total_tokens
        messages.append({"role": "assistant", "content": answer.choices[0].message.content})


def test_an_identical_prompt_recomputes_its_last_block(engine: Any) -> None:
    body = {"prompt": list(range(100, 164)), "max_tokens": 1}
    cached = [
        engine.http.post("/v1/completions", json=body).json()["usage"]["prompt_tokens_details"]
        for _ in range(2)
    ]
    assert cached == [{"cached_tokens": 0}, {"cached_tokens": 48}]


def test_limits(client: openai.OpenAI) -> None:
    assert ask(client, "Count.", max_tokens=4).choices[0].finish_reason == "length"
    assert ask(client, "Count.", max_completion_tokens=4).usage.completion_tokens == 4
    long = ask(client, "Count.", max_tokens=300, extra_body={"ignore_eos": True})
    assert (long.usage.completion_tokens, long.choices[0].finish_reason) == (300, "length")
    longer = ask(client, "Count.", max_tokens=300, extra_body={"min_tokens": 200})
    assert longer.usage.completion_tokens > 200


@pytest.mark.parametrize("as_list", [False, True])
def test_stop_strings(client: openai.OpenAI, as_list: bool) -> None:
    words = ask(client, "List words.").choices[0].message.content.split()
    stop = [words[5]] if as_list else words[5]
    stopped = ask(client, "List words.", stop=stop)
    assert stopped.choices[0].finish_reason == "stop"
    assert words[5] not in stopped.choices[0].message.content
    streamed = "".join(
        c.choices[0].delta.content or "" for c in ask(client, "List words.", stop=stop, stream=True)
    )
    assert streamed == stopped.choices[0].message.content


def test_several_choices(client: openai.OpenAI) -> None:
    answer = ask(client, "Choose.", n=3, max_tokens=8)
    texts = [choice.message.content for choice in answer.choices]
    assert len(set(texts)) == 3
    assert answer.usage.completion_tokens == 24
    streamed = ["", "", ""]
    for chunk in ask(client, "Choose.", n=3, max_tokens=8, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert streamed == texts


@pytest.mark.parametrize(
    ("tool_choice", "called"),
    [("required", "search"), ({"type": "function", "function": {"name": "weather"}}, "weather")],
)
def test_tool_calls(client: openai.OpenAI, tool_choice: Any, called: str) -> None:
    answer = ask(client, "How warm is it?", tools=TOOLS, tool_choice=tool_choice)
    call = answer.choices[0].message.tool_calls[0]
    assert answer.choices[0].finish_reason == "tool_calls"
    assert call.function.name == called
    arguments = json.loads(call.function.arguments)
    assert set(arguments) == ({"city"} if called == "weather" else set())
    pieces, names, reasons = [], [], []
    for chunk in ask(client, "How warm is it?", tools=TOOLS, tool_choice=tool_choice, stream=True):
        reasons.append(chunk.choices[0].finish_reason)
        for delta in chunk.choices[0].delta.tool_calls or []:
            pieces.append(delta.function.arguments or "")
            names += [delta.function.name] if delta.function.name else []
    assert ("".join(pieces), names) == (call.function.arguments, [called])
    assert reasons[-1] == "tool_calls"


def test_tools_lengthen_the_prompt(client: openai.OpenAI) -> None:
    plain = ask(client, "Hi.", max_tokens=1)
    with_tools = ask(client, "Hi.", max_tokens=1, tools=TOOLS)
    assert with_tools.usage.prompt_tokens > plain.usage.prompt_tokens + 50
    assert with_tools.choices[0].message.tool_calls in ([], None)
    assert ask(client, "Hi.", max_tokens=1, tools=TOOLS, tool_choice="none").usage == with_tools.usage


def test_text_completions_of_every_prompt_form(client: openai.OpenAI, engine: Any) -> None:
    text = "def main(arguments):"
    tokens = engine.http.post("/tokenize", json={"prompt": text}).json()["tokens"]

    def complete(prompt: Any, **options: Any) -> Any:
        return client.completions.create(model="emulated-model", prompt=prompt, **options)

    one = complete(text)
    assert one.usage is not None and one.usage.completion_tokens == 16
    assert one.id.startswith("cmpl-")
    assert complete(tokens).choices[0].text == one.choices[0].text
    many = complete([text, "Other text"], n=2)
    assert [choice.index for choice in many.choices] == [0, 1, 2, 3]
    assert many.choices[0].text == one.choices[0].text
    assert many.usage.completion_tokens == 64
    assert complete([tokens, tokens]).choices[1].text == one.choices[0].text
    assert "".join(chunk.choices[0].text for chunk in complete(text, stream=True)) == one.choices[0].text


def test_the_request_id_is_kept(engine: Any) -> None:
    headers = {"X-Request-Id": "abc-1"}
    for path, body, prefix in (
        ("/v1/completions", {"prompt": "x"}, "cmpl"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}, "chatcmpl"),
    ):
        answer = engine.http.post(path, json=body, headers=headers)
        assert answer.json()["id"] == f"{prefix}-abc-1"
        assert answer.headers["x-request-id"] == "abc-1"
        streamed = engine.http.post(path, json={**body, "stream": True}, headers=headers)
        assert streamed.headers["x-request-id"] == "abc-1"
        assert streamed.headers["content-type"].startswith("text/event-stream")
        assert streamed.text.endswith("data: [DONE]\n\n")


CHAT = {"messages": [{"role": "user", "content": "x"}]}


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("/v1/chat/completions", {**CHAT, "model": "other"}, 404, "The model `other` does not exist"),
        ("/v1/completions", {"prompt": "x", "model": "other"}, 404, "The model `other` does not exist"),
        ("/v1/chat/completions", "{broken", 400, "not valid JSON"),
        ("/v1/chat/completions", "[]", 400, "must be a JSON object"),
        ("/v1/chat/completions", {}, 400, "messages: Field required"),
        ("/v1/chat/completions", {"messages": []}, 400, "messages"),
        ("/v1/chat/completions", {"messages": [{"content": "x"}]}, 400, "chat template"),
        ("/v1/chat/completions", {**CHAT, "max_tokens": 0}, 400, "max_tokens"),
        ("/v1/chat/completions", {**CHAT, "n": 0}, 400, "n: "),
        ("/v1/chat/completions", {**CHAT, "stream_options": {}}, 400, "`stream=True`"),
        ("/v1/chat/completions", {**CHAT, "logprobs": True}, 400, "logprobs"),
        ("/v1/chat/completions", {**CHAT, "max_tokens": 2, "min_tokens": 3}, 400, "min_tokens"),
        ("/v1/chat/completions", {**CHAT, "tool_choice": "required"}, 400, "`tools` must be set"),
        ("/v1/chat/completions", {**CHAT, "tools": [{}]}, 400, "needs a function"),
        (
            "/v1/chat/completions",
            {**CHAT, "tools": TOOLS, "tool_choice": {"function": {"name": "x"}}},
            400,
            "'x', which is not among the tools",
        ),
        ("/v1/chat/completions", {**CHAT, "max_tokens": 10**6}, 400, "maximum context length is 131072"),
        ("/v1/completions", {"prompt": [5] * 131_072}, 400, "131072 input tokens"),
        ("/v1/completions", {}, 400, "prompt: Field required"),
        ("/v1/completions", {"prompt": ""}, 400, "empty"),
        ("/v1/completions", {"prompt": []}, 400, "empty"),
        ("/v1/completions", {"prompt": [4099]}, 400, "out of vocabulary"),
        ("/v1/completions", {"prompt": [-1]}, 400, "prompt"),
        ("/v1/completions", {"prompt": "x", "echo": True}, 400, "echo"),
        (
            "/v1/completions",
            {"prompt": "x", "kv_transfer_params": {"do_remote_prefill": True}},
            400,
            "remote_request_id",
        ),
        ("/tokenize", {}, 400, "prompt or messages"),
        ("/detokenize", {"tokens": [9999]}, 400, "out of vocabulary"),
    ],
)
def test_bad_requests_are_named(engine: Any, path: str, body: Any, status: int, message: str) -> None:
    content = body if isinstance(body, str) else json.dumps(body)
    answer = engine.http.post(path, content=content)
    error = answer.json()["error"]
    assert answer.status_code == error["code"] == status
    assert message in error["message"]
    assert error["type"] == ("NotFoundError" if status == 404 else "BadRequestError")
    assert "param" in error


def test_the_client_raises_its_own_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="other", messages=[{"role": "user", "content": "x"}])
    with pytest.raises(openai.BadRequestError):
        ask(client, "x", max_tokens=10**7)


def test_tokens_of_text_and_of_conversations(engine: Any) -> None:
    counted = engine.http.post("/tokenize", json={**CHAT, "return_token_strs": True}).json()
    answer = engine.http.post("/v1/chat/completions", json={**CHAT, "max_tokens": 1}).json()
    assert counted["count"] == len(counted["tokens"]) == answer["usage"]["prompt_tokens"]
    assert counted["token_strs"][0] == "<|im_start|>"
    assert counted["max_model_len"] == 131_072
    with_tools = engine.http.post("/tokenize", json={**CHAT, "tools": TOOLS}).json()
    assert with_tools["count"] > counted["count"]
    bare = engine.http.post("/tokenize", json={**CHAT, "add_generation_prompt": False}).json()
    assert counted["tokens"][: bare["count"]] == bare["tokens"]
    text = engine.http.post("/detokenize", json={"tokens": counted["tokens"]}).json()["prompt"]
    assert text == "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n"


def test_a_long_text_is_tokenized_like_a_short_one(engine: Any) -> None:
    text = "The quick brown fox. " * 4000
    counted = engine.http.post("/tokenize", json={"prompt": text}).json()
    assert engine.http.post("/detokenize", json={"tokens": counted["tokens"]}).json()["prompt"] == text


def test_models_and_status(engine: Any, client: openai.OpenAI) -> None:
    card = client.models.list().data[0]
    assert (card.id, card.owned_by) == (engine.model, "vllm")
    assert engine.http.get("/v1/models").json()["data"][0]["max_model_len"] == 131_072
    assert engine.http.get("/health").status_code == 200
    assert "version" in engine.http.get("/version").json()
    assert engine.http.get("/load").json() == {"server_load": 0}
    assert engine.http.get("/nowhere").status_code == 404
    assert engine.http.get("/v1/completions").status_code == 405


def test_metrics_have_the_names_of_vllm(engine: Any) -> None:
    before = engine.metrics()
    engine.http.post("/v1/completions", json={"prompt": [7] * 40, "max_tokens": 5})
    after = engine.metrics()
    grown = {name: after[name] - before.get(name, 0.0) for name in after}
    assert grown["vllm:prompt_tokens_total"] == grown["vllm:prefix_cache_queries_total"] == 40
    assert grown["vllm:generation_tokens_total"] == 5
    assert grown["vllm:time_to_first_token_seconds_count"] == 1
    assert grown["vllm:inter_token_latency_seconds_count"] == 4
    assert after["vllm:num_requests_running"] == after["vllm:num_requests_waiting"] == 0
    assert {"vllm:kv_cache_usage_perc", "vllm:prefix_cache_hits_total", "vllm:num_preemptions_total"} <= set(
        after
    )
    text = engine.http.get("/metrics").text
    assert 'vllm:num_requests_running{engine="0",model_name="emulated-model"}' in text
    info = next(line for line in text.splitlines() if line.startswith("vllm:cache_config_info"))
    assert 'block_size="16"' in info and 'num_gpu_blocks="28000"' in info
    assert 'prefix_caching_hash_algo="sha256_cbor"' in info


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_blocks(engine: Any, stream: bool) -> None:
    body = {"prompt": [9] * 40, "max_tokens": 100_000, "ignore_eos": True, "stream": stream}
    with engine.client() as client:
        if stream:
            answer = client.completions.create(
                model=engine.model,
                prompt=[9] * 40,
                max_tokens=100_000,
                stream=True,
                extra_body={"ignore_eos": True},
            )
            next(iter(answer))
            engine.eventually("vllm:num_requests_running", 1)
            answer.close()
        else:
            with pytest.raises(openai.APITimeoutError):
                client.with_options(timeout=0.3).post("/completions", body=body, cast_to=object)
    engine.eventually("vllm:num_requests_running", 0)
    engine.eventually("vllm:kv_cache_usage_perc", 0)
    assert engine.http.get("/load").json() == {"server_load": 0}
