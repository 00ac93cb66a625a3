"""The `openai` client, unchanged, against the real processes."""

import json

import openai
import pytest
from front_door_process import FrontDoor

MODEL = "emulated-8b"
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Current weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def _messages(text: str) -> list[dict]:
    return [{"role": "system", "content": "You are terse."}, {"role": "user", "content": text}]


def test_models_are_listed(client: openai.OpenAI) -> None:
    models = client.models.list().data
    assert [m.id for m in models] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


def test_chat_streamed_and_whole_agree(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model=MODEL, messages=_messages("Same?"), max_tokens=20)
    chunks = list(
        client.chat.completions.create(
            model=MODEL,
            messages=_messages("Same?"),
            max_tokens=20,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert text
    usage = chunks[-1].usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (whole.usage.prompt_tokens, 20)
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens


def test_text_completions(client: openai.OpenAI) -> None:
    whole = client.completions.create(model=MODEL, prompt="Once upon a time", max_tokens=12)
    streamed = client.completions.create(model=MODEL, prompt="Once upon a time", max_tokens=12, stream=True)
    assert "".join(c.choices[0].text for c in streamed) == whole.choices[0].text
    by_ids = client.completions.create(model=MODEL, prompt=list(range(300, 340)), max_tokens=4)
    assert (by_ids.usage.prompt_tokens, by_ids.usage.completion_tokens) == (40, 4)


def test_stop_n_and_limits(client: openai.OpenAI) -> None:
    full = client.chat.completions.create(model=MODEL, messages=_messages("Count."), max_completion_tokens=30)
    words = full.choices[0].message.content.split()
    assert full.usage.completion_tokens == 30
    stop = f" {words[4]}"
    stopped = client.chat.completions.create(
        model=MODEL, messages=_messages("Count."), max_tokens=30, stop=[stop]
    )
    assert stopped.choices[0].finish_reason == "stop"
    assert stopped.choices[0].message.content == full.choices[0].message.content.split(stop)[0]
    several = client.chat.completions.create(model=MODEL, messages=_messages("Count."), max_tokens=8, n=3)
    assert [c.index for c in several.choices] == [0, 1, 2]
    assert several.usage.completion_tokens == 24


def test_tools_reach_the_engine(client: openai.OpenAI) -> None:
    plain = client.chat.completions.create(model=MODEL, messages=_messages("Weather?"), max_tokens=4)
    answer = client.chat.completions.create(
        model=MODEL, messages=_messages("Weather?"), tools=[TOOL], tool_choice="required"
    )
    assert answer.usage.prompt_tokens > plain.usage.prompt_tokens, "the tools are part of the prompt"
    call = answer.choices[0].message.tool_calls[0]
    assert call.function.name == "get_weather"
    assert "city" in json.loads(call.function.arguments)
    assert answer.choices[0].finish_reason == "tool_calls"


def test_a_conversation_reuses_cache_visibly(client: openai.OpenAI, cluster: FrontDoor) -> None:
    messages = [{"role": "system", "content": "You know many things. " * 40}]
    cached, overlaps, prefill_hits = [], [], []
    for question in ("What is a cache?", "And a prefix?", "Why does it help?"):
        messages.append({"role": "user", "content": question})
        raw = client.chat.completions.with_raw_response.create(model=MODEL, messages=messages, max_tokens=40)
        answer = raw.parse()
        messages.append({"role": "assistant", "content": answer.choices[0].message.content})
        cached.append(answer.usage.prompt_tokens_details.cached_tokens)
        overlaps.append(int(raw.headers["x-conductor-overlap-tokens"]))
        why = cluster.get(f"/v1/placements/{raw.headers['x-conductor-placement-id']}")
        prefill_hits.append(why["observed"]["cached_tokens"])
        # The next turn's placement sees this turn once its events have arrived.
        tokens = answer.usage.prompt_tokens // 16
        prefill = raw.headers["x-conductor-prefill-instance"]
        cluster.wait_until(
            lambda p=prefill, n=tokens: (
                cluster.instances()[p]["ranks"][0]["cached_blocks"].get("device", 0) >= n
            ),
            "the KV events of the turn",
        )
    assert cached[0] == 0
    assert 0 < cached[1] < cached[2]
    assert overlaps == prefill_hits, "the index predicted exactly what the prefill engine reused"
    assert 0 < overlaps[1] < overlaps[2]


def test_every_answer_says_where_it_ran_and_the_placement_says_why(
    client: openai.OpenAI, cluster: FrontDoor
) -> None:
    raw = client.chat.completions.with_raw_response.create(
        model=MODEL,
        messages=_messages("Why? " * 400),  # a short one would be prefilled where it decodes
        max_tokens=4,
        extra_headers={"x-request-id": "my-request"},
    )
    headers = raw.headers
    assert headers["x-request-id"] == "my-request"
    assert headers["x-conductor-prefill-instance"] in ("prefill-0", "prefill-1")
    assert headers["x-conductor-decode-instance"] in ("decode-0", "decode-1")
    assert float(headers["x-conductor-predicted-ttft-ms"]) > 0
    why = cluster.get(f"/v1/placements/{headers['x-conductor-placement-id']}")
    assert why["request_id"] == "my-request"
    assert why["prefill_instance"] == headers["x-conductor-prefill-instance"]
    assert why["token_source"] == "local"
    assert why["observed"]["prompt_tokens"] == raw.parse().usage.prompt_tokens == why["prompt_tokens"]
    assert {c["instance"] for c in why["candidates"]} == {"prefill-0", "prefill-1", "decode-0", "decode-1"}
    assert why["outcome"] == "finished"


def test_the_router_counts_the_tokens_that_the_engine_counts(
    client: openai.OpenAI, cluster: FrontDoor
) -> None:
    messages = [*_messages("Grüße, 世界! 🎉\n\n  indented"), {"role": "assistant", "content": "ok"}]
    messages.append(
        {"role": "user", "content": [{"type": "text", "text": "parts"}, {"type": "text", "text": "too"}]}
    )
    raw = client.chat.completions.with_raw_response.create(
        model=MODEL, messages=messages, max_tokens=1, tools=[TOOL]
    )
    why = cluster.get(f"/v1/placements/{raw.headers['x-conductor-placement-id']}")
    assert why["prompt_tokens"] == raw.parse().usage.prompt_tokens


@pytest.mark.parametrize(
    ("body", "status", "param", "said"),
    [
        (b'{"model": "emulated-8b", "messages": [', 400, None, "JSON"),
        (b"[]", 400, None, "object"),
        (b'{"messages": [{"role": "user", "content": "x"}]}', 400, "model", "model"),
        (b'{"model": "emulated-8b"}', 400, "messages", "messages"),
        (b'{"model": "emulated-8b", "messages": []}', 400, "messages", "messages"),
        (b'{"model": "gpt-5", "messages": [{"role": "user", "content": "x"}]}', 404, "model", "emulated-8b"),
        (
            b'{"model": "emulated-8b", "messages": [{"role": "user", "content": "x"}], "max_tokens": "many"}',
            400,
            "max_tokens",
            "max_tokens",
        ),
    ],
)
def test_bad_input_is_answered_in_openai_shape(
    cluster: FrontDoor, body: bytes, status: int, param: str | None, said: str
) -> None:
    answer = cluster.http.post(
        "/v1/chat/completions", content=body, headers={"content-type": "application/json"}
    )
    assert answer.status_code == status
    error = answer.json()["error"]
    assert error["param"] == param
    assert said in error["message"]
    assert error["type"] == "invalid_request_error"


def test_errors_reach_the_client_as_its_own_exceptions(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="emulated-8b"):
        client.chat.completions.create(model="gpt-5", messages=_messages("?"))
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model=MODEL, messages=[])


def test_metrics_cover_router_and_cluster(cluster: FrontDoor, client: openai.OpenAI) -> None:
    client.chat.completions.create(model=MODEL, messages=_messages("?"), max_tokens=2)
    text = cluster.http.get("/metrics").text
    for name in (
        'conductor_requests_total{code="200"',
        "conductor_ttft_seconds_count",
        'conductor_token_source_total{source="local"}',
        'conductor_instance_up{instance="prefill-0",role="prefill"} 1.0',
        'conductor_kv_stream_warm{instance="decode-1",rank="0"} 1.0',
        "conductor_index_blocks",
    ):
        assert name in text, name


def test_the_api_documents_itself(cluster: FrontDoor) -> None:
    paths = cluster.get("/openapi.json")["paths"]
    assert {"/v1/placements", "/v1/placements/{placement_id}", "/v1/instances", "/health"} <= paths.keys()
    assert cluster.http.get("/docs").status_code == 200
