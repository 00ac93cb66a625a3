"""Prefill on one process, decode on another, with vLLM's NIXL request fields."""

import time
from typing import Any

import httpx
import msgspec
import openai
import pytest
import zmq

TO_PREFILL = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
MESSAGES = [{"role": "user", "content": "Explain the cache in your own words, and then once more. " * 4}]


@pytest.fixture(scope="module")
def prefill(emulator: Any) -> Any:
    return emulator("--speed", 20, "--role", "prefill", "--lease-s", 30)


@pytest.fixture(scope="module")
def decode(emulator: Any) -> Any:
    return emulator("--speed", 20, "--role", "decode", "--pull-timeout-s", 0.3)


def prefilled(prefill: Any, path: str = "/v1/chat/completions", **body: Any) -> Any:
    """The prefill leg: one token, and where its KV cache can be pulled from."""
    body = {"max_tokens": 1, "max_completion_tokens": 1, "kv_transfer_params": TO_PREFILL, **body}
    answer = prefill.http.post(path, json=body, headers={"X-Request-Id": "r1"})
    assert answer.status_code == 200, answer.text
    return answer.json()["kv_transfer_params"]


def test_the_offer_has_the_fields_of_vllm(prefill: Any, decode: Any) -> None:
    offer = prefilled(prefill, "/v1/completions", prompt=[11] * 300)
    request_id = offer.pop("remote_request_id")
    assert request_id.startswith("cmpl-r1-")
    assert len(offer.pop("remote_engine_id")) == 36
    blocks = offer.pop("remote_block_ids")
    assert len(blocks) == 1 and len(blocks[0]) == 19
    assert offer == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_host": "127.0.0.1",
        "remote_port": prefill.port,
        "tp_size": 1,
        "dcp_size": 1,
        "pp_size": 1,
        "remote_num_tokens": 300,
        "remote_blocks_expiry_time": None,
        "transfer_mode": "pull",
        "remote_prefill_cached_tokens": 0,
    }
    lease = prefill.http.get(f"/kv_transfers/{request_id}").json()
    assert (lease["tokens"], lease["blocks"]) == (300, 19)
    assert prefill.metrics()["vllm:kv_cache_usage_perc"] > 0
    assert prefill.http.delete(f"/kv_transfers/{request_id}").status_code == 204
    assert prefill.http.delete(f"/kv_transfers/{request_id}").status_code == 404
    prefill.eventually("vllm:kv_cache_usage_perc", 0)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choices", [1, 2])
def test_the_text_is_that_of_one_engine(prefill: Any, decode: Any, stream: bool, choices: int) -> None:
    with prefill.client() as whole, decode.client() as split:
        messages: Any = [*MESSAGES, {"role": "user", "content": f"{stream} {choices}"}]
        offer = prefilled(prefill, messages=messages, n=choices)
        answer: Any = split.chat.completions.create(
            model=decode.model,
            messages=messages,
            n=choices,
            stream=stream,
            extra_body={"kv_transfer_params": offer},
        )
        texts = [""] * choices
        if stream:
            for chunk in answer:
                texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
        else:
            texts = [choice.message.content for choice in answer.choices]
        expected = whole.chat.completions.create(model=prefill.model, messages=messages, n=choices)
    assert texts == [choice.message.content for choice in expected.choices]
    for engine in (prefill, decode):
        engine.eventually("vllm:kv_cache_usage_perc", 0)


def test_a_second_hand_off_moves_only_what_is_missing(prefill: Any, decode: Any) -> None:
    prompt = [17] * 40
    for pulled, cached in ((40, 0), (8, 32)):
        before = decode.metrics()["vllm:external_prefix_cache_hits_total"]
        offer = prefilled(prefill, "/v1/completions", prompt=prompt)
        body = {"prompt": prompt, "kv_transfer_params": offer, "max_tokens": 3}
        usage = decode.http.post("/v1/completions", json=body).json()["usage"]
        assert usage["prompt_tokens_details"] == {"cached_tokens": cached}
        assert decode.metrics()["vllm:external_prefix_cache_hits_total"] - before == pulled


def test_the_prefill_instances_hit_is_passed_on(prefill: Any, decode: Any) -> None:
    prompt = [19] * 64
    prefill.http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1})
    offer = prefilled(prefill, "/v1/completions", prompt=prompt)
    assert offer["remote_prefill_cached_tokens"] == 48
    body = {"prompt": prompt, "kv_transfer_params": offer, "max_tokens": 3}
    usage = decode.http.post("/v1/completions", json=body).json()["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 48}


def test_pulled_blocks_are_announced(prefill: Any, decode: Any) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as replay:
        replay.connect(f"tcp://127.0.0.1:{decode.replay_port}")
        prompt = list(range(500, 540))
        offer = prefilled(prefill, "/v1/completions", prompt=prompt)
        body = {"prompt": prompt, "kv_transfer_params": offer, "max_tokens": 1}
        assert decode.http.post("/v1/completions", json=body).status_code == 200
        replay.send_multipart([b"", bytes(8)])
        stored = []
        while (frames := replay.recv_multipart())[2] != b"\xff" * 8:
            stored += [e["token_ids"] for e in msgspec.msgpack.decode(frames[3])[1] if "token_ids" in e]
        assert stored[-1] == prompt[:32]


@pytest.mark.parametrize("stream", [False, True])
def test_a_lease_that_is_gone_fails_the_decode(prefill: Any, decode: Any, stream: bool) -> None:
    offer = prefilled(prefill, "/v1/completions", prompt=[23] * 40)
    prefill.http.delete(f"/kv_transfers/{offer['remote_request_id']}")
    started_s = time.monotonic()
    body = {"prompt": [23] * 40, "kv_transfer_params": offer, "stream": stream}
    answer = decode.http.post("/v1/completions", json=body)
    assert answer.status_code == 500
    assert answer.json()["error"]["type"] == "InternalServerError"
    assert "404" in answer.json()["error"]["message"]
    assert time.monotonic() - started_s >= 0.3
    decode.eventually("vllm:kv_cache_usage_perc", 0)


def test_a_prefill_process_that_died_fails_the_decode(emulator: Any, decode: Any) -> None:
    short_lived = emulator("--speed", 20)
    offer = prefilled(short_lived, "/v1/completions", prompt=[29] * 40)
    short_lived.process.kill()
    short_lived.process.wait()
    with decode.client() as client, pytest.raises(openai.InternalServerError, match="KV transfer of"):
        client.completions.create(
            model=decode.model, prompt=[29] * 40, extra_body={"kv_transfer_params": offer}
        )
    # The router's way out: the same request without the hand-off.
    retried = decode.http.post("/v1/completions", json={"prompt": [29] * 40})
    assert retried.status_code == 200


def test_a_decode_told_to_hang_never_answers_a_lost_prefill(emulator: Any, prefill: Any) -> None:
    hanging = emulator("--speed", 20, "--pull-timeout-s", 0.1, "--hang-on-lost-prefill")
    offer = prefilled(prefill, "/v1/completions", prompt=[31] * 40)
    prefill.http.delete(f"/kv_transfers/{offer['remote_request_id']}")
    body = {"prompt": [31] * 40, "kv_transfer_params": offer}
    with pytest.raises(httpx.ReadTimeout):
        hanging.http.post("/v1/completions", json=body, timeout=0.6)
    hanging.eventually("vllm:num_requests_waiting", 0)  # the client left
    hanging.eventually("vllm:kv_cache_usage_perc", 0)


def test_leases_expire(emulator: Any) -> None:
    forgetful = emulator("--speed", 20, "--lease-s", 0.2)
    offer = prefilled(forgetful, "/v1/completions", prompt=[37] * 40)
    forgetful.eventually("vllm:nixl_num_kv_expired_reqs_total", 1)
    assert forgetful.http.get(f"/kv_transfers/{offer['remote_request_id']}").status_code == 404
    assert forgetful.metrics()["vllm:kv_cache_usage_perc"] == 0


def test_batches_cannot_be_handed_off(prefill: Any) -> None:
    body = {"prompt": ["a", "b"], "kv_transfer_params": TO_PREFILL}
    assert prefill.http.post("/v1/completions", json=body).status_code == 400
