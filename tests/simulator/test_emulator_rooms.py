"""Prefill on one process, decode on another, meeting in a room as SGLang's servers do."""

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import pytest

PROMPT = list(range(100, 140))


@pytest.fixture(scope="module")
def bootstrap_port(unused_ports: Any) -> int:
    return int(unused_ports(1)[0])


@pytest.fixture(scope="module")
def prefill(emulator: Any, bootstrap_port: int) -> Any:
    room = ("--hand-off", "sglang", "--bootstrap-port", bootstrap_port, "--lease-s", 1)
    return emulator("--speed", 20, "--role", "prefill", *room)


@pytest.fixture(scope="module")
def decode(emulator: Any) -> Any:
    waits = ("--room-timeout-s", 1.5, "--pull-timeout-s", 0.3)
    return emulator("--speed", 20, "--role", "decode", "--hand-off", "sglang", *waits)


def asked(engine: Any, pool: ThreadPoolExecutor, port: int, room: int, **body: Any) -> Future[httpx.Response]:
    """A request under way."""
    document = {
        "prompt": PROMPT,
        "bootstrap_host": "127.0.0.1",
        "bootstrap_port": port,
        "bootstrap_room": room,
        **body,
    }
    return pool.submit(engine.http.post, "/v1/completions", json=document)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choices", [1, 2])
@pytest.mark.parametrize("first", ["prefill", "decode"])
def test_the_text_is_that_of_one_engine(
    emulator: Any,
    prefill: Any,
    decode: Any,
    bootstrap_port: int,
    engine: Any,
    stream: bool,
    choices: int,
    first: str,
) -> None:
    room = 2**62 + 4 * choices + 2 * stream + (first == "prefill")
    body = {"n": choices, "max_tokens": 20, "stream": stream, "prompt": [*PROMPT, room % 100]}
    order = [prefill, decode] if first == "prefill" else [decode, prefill]
    with ThreadPoolExecutor() as pool:
        answers = {id(each): asked(each, pool, bootstrap_port, room, **body) for each in order}
        computed, told = answers[id(prefill)].result(), answers[id(decode)].result()
    assert (computed.status_code, told.status_code) == (200, 200)
    expected = engine.http.post("/v1/completions", json={**body, "stream": False}).json()
    if stream:
        assert told.text.count("data: ") == 20 * choices + 1 and computed.text.count("data: ") == choices + 1
    else:
        texts = [choice["text"] for choice in expected["choices"]]
        assert [choice["text"] for choice in told.json()["choices"]] == texts
        assert computed.json()["usage"]["completion_tokens"] == choices
        firsts = [choice["text"] for choice in computed.json()["choices"]]
        assert all(text.startswith(one) for text, one in zip(texts, firsts, strict=True))
    for each in (prefill, decode):
        each.eventually("vllm:kv_cache_usage_perc", 0)


def test_a_request_without_a_room_is_refused(prefill: Any, decode: Any) -> None:
    for engine in (prefill, decode):
        answer = engine.http.post("/v1/completions", json={"prompt": PROMPT})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "bootstrap_room")


def test_a_room_that_nobody_offers_fails_the_decode(decode: Any, prefill: Any, bootstrap_port: int) -> None:
    with ThreadPoolExecutor() as pool:
        answer = asked(decode, pool, bootstrap_port, 77).result()
    assert answer.status_code == 500 and "room 77" in answer.json()["error"]["message"]
    decode.eventually("vllm:kv_cache_usage_perc", 0)


def test_a_prefill_that_is_away_fails_the_decode(decode: Any, unused_ports: Any) -> None:
    with ThreadPoolExecutor() as pool:
        answer = asked(decode, pool, unused_ports(1)[0], 78).result()
    assert answer.status_code == 500 and "room 78" in answer.json()["error"]["message"]


def test_kv_that_nobody_takes_fails_the_prefill(prefill: Any, bootstrap_port: int) -> None:
    with ThreadPoolExecutor() as pool:
        answer = asked(prefill, pool, bootstrap_port, 79).result()
    assert answer.status_code == 500 and "room 79" in answer.json()["error"]["message"]
    prefill.eventually("vllm:kv_cache_usage_perc", 0)


def test_a_prefill_whose_client_leaves_sends_the_decode_home(
    prefill: Any, decode: Any, bootstrap_port: int
) -> None:
    body = {
        "prompt": [100 + number % 900 for number in range(60_000)],  # long enough to leave meanwhile
        "bootstrap_host": "127.0.0.1",
        "bootstrap_port": bootstrap_port,
        "bootstrap_room": 80,
    }
    with ThreadPoolExecutor() as pool:
        waiting = asked(decode, pool, bootstrap_port, 80, prompt=body["prompt"])
        decode.eventually("vllm:num_requests_waiting", 1)
        with pytest.raises(httpx.ReadTimeout):
            prefill.http.post("/v1/completions", json=body, timeout=0.02)
        answer = waiting.result()
    assert answer.status_code == 500
    prefill.eventually("vllm:kv_cache_usage_perc", 0)


def test_a_prefill_engine_needs_its_bootstrap_port(emulator: Any) -> None:
    with pytest.raises(RuntimeError, match="did not start"):
        emulator("--role", "prefill", "--hand-off", "sglang")
