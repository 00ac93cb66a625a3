"""Bodies of the two legs of a hand-off, and usage read from responses."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conductor.placement import Target, Usage
from router import HandoffError, handoff_protocol
from router.disaggregation.bodies import forwarded_body
from router.inference import Endpoint, parse_inference
from router.usage import usage_from_tail

NIXL = handoff_protocol("vllm-nixl").begin(Target("p", "http://p:1", "p", 1))


def request(endpoint: Endpoint = Endpoint.CHAT, **fields: Any) -> Any:
    prompt = (
        {"messages": [{"role": "user", "content": "hi"}]} if endpoint is Endpoint.CHAT else {"prompt": "hi"}
    )
    return parse_inference(endpoint, b" \n" + orjson.dumps({"model": "m", **prompt, **fields}))


def test_prefill_body_of_a_completion_has_no_chat_fields() -> None:
    asked = orjson.loads(NIXL.prefill_body(request(Endpoint.COMPLETIONS, stream=True), "engine"))
    assert asked["model"] == "engine"
    assert (asked["stream"], asked["max_tokens"]) == (False, 1)
    assert "max_completion_tokens" not in asked and "n" not in asked


def test_prefill_body_drops_what_contradicts_one_token() -> None:
    fields = {"stream": True, "stream_options": {}, "min_tokens": 5, "min_completion_tokens": 5}
    original = request(**fields)
    asked = orjson.loads(NIXL.prefill_body(original, "m"))
    assert not asked.keys() & {"stream_options", "min_tokens", "min_completion_tokens"}
    assert original.document["min_tokens"] == 5


@given(
    st.dictionaries(
        st.text(), st.one_of(st.integers(-(2**53), 2**53), st.text(), st.lists(st.integers(0, 9)))
    )
)
def test_decode_body_is_the_request_with_the_parameters(params: dict[str, Any]) -> None:
    raw = orjson.dumps(params, option=orjson.OPT_INDENT_2)
    answer = NIXL.prefill_answer(b'{"id":"x","kv_transfer_params":' + raw + b',"usage":null}')
    assert answer.transfer == raw
    original = request(temperature=0.5)
    body = NIXL.decode_body(original, "m", answer.transfer)
    assert body == b' \n{"kv_transfer_params":' + raw + b"," + bytes(original.body)[3:]
    renamed = orjson.loads(NIXL.decode_body(original, "other", answer.transfer))
    assert renamed == {**original.document, "model": "other", "kv_transfer_params": params}


def test_parameters_of_the_client_are_replaced() -> None:
    original = request(kv_transfer_params={"theirs": 1})
    body = NIXL.decode_body(original, "m", b'{"ours":1}')
    assert body.count(b"kv_transfer_params") == 1
    assert orjson.loads(body)["kv_transfer_params"] == {"ours": 1}


@pytest.mark.parametrize("body", [b"", b"[]", b'{"kv_transfer_params":', b'{"usage":5}'])
def test_unreadable_answers(body: bytes) -> None:
    with pytest.raises(HandoffError):
        NIXL.prefill_answer(body)


def test_prefill_answer_reports_the_hit() -> None:
    answer = NIXL.prefill_answer(b'{"kv_transfer_params":{"remote_prefill_cached_tokens":320}}')
    assert answer.cached_tokens == 320
    usage = b'"usage":{"prompt_tokens":9,"prompt_tokens_details":{"cached_tokens":4}}'
    answer = NIXL.prefill_answer(b"{" + usage + b"}")
    assert (answer.transfer, answer.cached_tokens) == (None, 4)


def test_unknown_protocol_names_the_known_ones() -> None:
    with pytest.raises(
        HandoffError, match=r"'smoke-signal'; known: sglang, trtllm, vllm-mooncake, vllm-nixl"
    ):
        handoff_protocol("smoke-signal")


def test_body_is_serialised_anew_only_for_another_name() -> None:
    original = request()
    assert forwarded_body(original, "m") is original.body
    assert orjson.loads(forwarded_body(original, "n")) == {**original.document, "model": "n"}


@pytest.mark.parametrize(
    ("tail", "usage"),
    [
        (b'"usage":{"prompt_tokens":3,"total_tokens":5,"completion_tokens":2}}', Usage(3, 2, None)),
        (b'"usage": { "prompt_tokens" : 3 } }', Usage(3, None, None)),
        (
            b'"usage":{"prompt_tokens":1,"completion_tokens":1}} "usage":{"prompt_tokens":2,"completion_tokens":9}',
            Usage(2, 9),
        ),
        (b'{"usage":null}', Usage()),
        (rb'{"content":"say \"usage\":{\"prompt_tokens\":3}"}', Usage()),
        (b"", Usage()),
    ],
)
def test_usage_is_read_from_the_tail(tail: bytes, usage: Usage) -> None:
    assert usage_from_tail(tail) == usage
