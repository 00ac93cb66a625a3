"""Responses, messages, embeddings, ranks and tokens, through the real processes."""

import json

import openai
import pytest
from front_door_process import FrontDoor

MODEL = "emulated-8b"
IDS = list(range(300, 700))
LONG = "Why is a cache? " * 100  # a short prompt would be prefilled where it decodes


def _why(cluster: FrontDoor, headers) -> dict:
    return cluster.get(f"/v1/placements/{headers['x-conductor-placement-id']}")


def _events(text: str) -> list[tuple[str, dict]]:
    blocks = [block.split("\n") for block in text.split("\n\n") if block.startswith("event: ")]
    return [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in blocks]


@pytest.mark.parametrize("text", ["Same?", LONG])
def test_responses_streamed_and_whole_agree(client: openai.OpenAI, cluster: FrontDoor, text: str) -> None:
    raw = client.responses.with_raw_response.create(
        model=MODEL, input=text, instructions="Be brief.", max_output_tokens=20
    )
    whole = raw.parse()
    events = list(
        client.responses.create(
            model=MODEL, input=text, instructions="Be brief.", max_output_tokens=20, stream=True
        )
    )
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == whole.output_text
    assert whole.output_text
    assert events[-1].type == "response.incomplete"
    assert events[-1].response.usage.output_tokens == whole.usage.output_tokens == 20
    why = _why(cluster, raw.headers)
    assert why["token_source"] == "local"
    assert why["prompt_tokens"] == why["observed"]["prompt_tokens"] == whole.usage.input_tokens
    assert why["observed"]["output_tokens"] == 20
    assert why["route"] == "/v1/responses"


@pytest.mark.parametrize("text", ["Same?", LONG])
def test_messages_streamed_and_whole_agree(cluster: FrontDoor, text: str) -> None:
    body = {
        "model": MODEL,
        "max_tokens": 20,
        "system": "Be brief.",
        "messages": [{"role": "user", "content": [{"type": "text", "text": text}]}],
    }
    answer = cluster.http.post("/v1/messages", json=body)
    whole = answer.json()
    streamed = cluster.http.post("/v1/messages", json={**body, "stream": True})
    events = _events(streamed.text)
    kinds = [name for name, _ in events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    deltas = [data["delta"]["text"] for name, data in events if name == "content_block_delta"]
    assert "".join(deltas) == whole["content"][0]["text"] != ""
    assert whole["stop_reason"] == events[-2][1]["delta"]["stop_reason"] == "max_tokens"
    for headers, usage in ((answer.headers, whole["usage"]), (streamed.headers, events[-2][1]["usage"])):
        why = _why(cluster, headers)
        assert why["token_source"] == "local"
        prompt_tokens = usage["input_tokens"] + usage["cache_read_input_tokens"]
        assert why["prompt_tokens"] == why["observed"]["prompt_tokens"] == prompt_tokens
        assert why["observed"]["output_tokens"] == usage["output_tokens"] == 20


def test_errors_of_the_engine_and_of_the_router_have_the_shape_of_the_api(cluster: FrontDoor) -> None:
    body = {"model": MODEL, "max_tokens": 5, "messages": [{"role": "user", "content": "x"}]}
    unknown = cluster.http.post("/v1/messages", json={**body, "model": "claude"})
    assert unknown.status_code == 404
    assert unknown.json()["error"]["type"] == "not_found_error"
    image = [{"role": "user", "content": [{"type": "image", "source": {}}]}]
    refused = cluster.http.post("/v1/messages", json={**body, "messages": image})
    assert refused.status_code == 400
    assert (refused.json()["type"], refused.json()["error"]["type"]) == ("error", "invalid_request_error")
    with pytest.raises(openai.NotFoundError, match="resp_unknown"):
        openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="x", max_retries=0).responses.create(
            model=MODEL, input="x", previous_response_id="resp_unknown"
        )


def test_embeddings_ranks_and_scores(client: openai.OpenAI, cluster: FrontDoor) -> None:
    answer = client.embeddings.create(model=MODEL, input=["one", "two"], encoding_format="float")
    again = client.embeddings.create(model=MODEL, input="two", encoding_format="float")
    assert answer.data[1].embedding == again.data[0].embedding != answer.data[0].embedding
    assert answer.usage.prompt_tokens > again.usage.prompt_tokens > 0
    for path in ("/v1/rerank", "/rerank"):
        ranked = cluster.http.post(path, json={"model": MODEL, "query": "two", "documents": ["one", "two"]})
        results = ranked.json()["results"]
        assert [result["index"] for result in results] == [1, 0]
        assert results[0]["relevance_score"] == pytest.approx(1)
        where = [ranked.headers[f"x-conductor-{leg}-instance"] for leg in ("prefill", "decode")]
        assert where[0] == where[1]
    for path in ("/v1/score", "/score"):
        scored = cluster.http.post(path, json={"model": MODEL, "text_1": "two", "text_2": ["one", "two"]})
        assert [data["score"] for data in scored.json()["data"]][1] == pytest.approx(1)


def test_tokens_there_and_back_on_every_instance(cluster: FrontDoor) -> None:
    asked = set()
    for _ in range(4):
        answer = cluster.http.post("/tokenize", json={"model": MODEL, "prompt": "Hello there"})
        tokens = answer.json()["tokens"]
        asked.add(answer.headers["x-conductor-decode-instance"])
        back = cluster.http.post("/detokenize", json={"model": MODEL, "tokens": tokens})
        assert back.json()["prompt"] == "Hello there"
        asked.add(back.headers["x-conductor-decode-instance"])
    assert asked == {"prefill-0", "prefill-1", "decode-0", "decode-1"}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/inference/v1/generate", {"token_ids": IDS, "sampling_params": {"max_tokens": 20}}),
        ("/generate", {"input_ids": IDS[::-1], "sampling_params": {"max_new_tokens": 20}}),
    ],
)
def test_tokens_in_find_their_prefix_again(cluster: FrontDoor, path: str, body: dict) -> None:
    overlap = str((len(IDS) - 1) // 16 * 16)  # the last block of a prompt is computed again

    def found() -> bool:
        answer = cluster.http.post(path, json=body)
        assert answer.status_code == 200
        return answer.headers["x-conductor-overlap-tokens"] == overlap

    cluster.wait_until(found, "the prefix is found")
    streamed = cluster.http.post(path, json={**body, "stream": True})
    why = _why(cluster, streamed.headers)
    assert (why["token_source"], why["route"], why["overlap_tokens"]) == ("client", path, int(overlap))
    assert streamed.text.endswith("data: [DONE]\n\n")
