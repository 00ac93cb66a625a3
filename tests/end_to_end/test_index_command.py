"""`conductor index` as a process, fed by a real emulated engine."""

import signal
import subprocess
import sys
import time

import httpx
from front_door_process import conductor_command, free_port

from conductor import __version__

PROMPT = list(range(100, 260))


def _wait(url: str, path: str, what) -> dict:
    deadline_s = time.monotonic() + 30
    while True:
        try:
            answer = httpx.get(f"{url}{path}", trust_env=False)
            if answer.status_code == 200 and what(answer):
                return answer
        except httpx.TransportError:
            pass
        assert time.monotonic() < deadline_s, f"{url}{path}"
        time.sleep(0.05)


def test_the_index_alone_answers_a_router_of_another_kind() -> None:
    ports = [free_port() for _ in range(4)]
    engine = subprocess.Popen(
        (
            sys.executable, "-m", "simulator.emulator", "--port", str(ports[0]), "--model", "m",
            "--log-level", "error", "--kv-event-port", str(ports[1]), "--kv-replay-port", str(ports[2]),
        )
    )  # fmt: skip
    index = subprocess.Popen(conductor_command("index", "--port", str(ports[3])), stderr=subprocess.PIPE)
    engine_url, index_url = f"http://127.0.0.1:{ports[0]}", f"http://127.0.0.1:{ports[3]}"
    try:
        _wait(engine_url, "/health", lambda answer: True)
        _wait(index_url, "/health", lambda answer: True)
        topic = httpx.get(f"{engine_url}/kv_event_sources", trust_env=False).json()["0"]["topic"]
        registered = httpx.post(
            f"{index_url}/register",
            json={
                "endpoint": f"tcp://127.0.0.1:{ports[1]}",
                "replay_endpoint": f"tcp://127.0.0.1:{ports[2]}",
                "type": "vLLM",
                "modelname": "m",
                "instance_id": "engine-0",
                "block_size": 16,
                "topic": topic,
            },
            trust_env=False,
        )
        assert registered.status_code == 200, registered.text
        body = {"model": "m", "prompt": PROMPT, "max_tokens": 1}
        assert httpx.post(f"{engine_url}/v1/completions", json=body, trust_env=False).status_code == 200
        _wait(index_url, "/v1/cache/tree", lambda answer: answer.json()["blocks"] >= 10)
        query = {"model": "m", "token_ids": PROMPT, "block_size": 16}
        for path in ("/query", "/v1/cache/lookup"):
            answer = httpx.post(f"{index_url}{path}", json=query, trust_env=False).json()
            assert answer["default"]["engine-0"]["longest_matched"] == 160
        pushed = {
            "event_id": 1,
            "event_type": "stored",
            "model_name": "m",
            "block_size": 16,
            "backend_id": "store-0",
            "medium": "cpu",
            "seq_hashes": [1],
            "token_ids": PROMPT[:16],
        }
        answer = httpx.post(f"{index_url}/v1/events", json=[pushed], trust_env=False)
        assert (answer.status_code, answer.json()["applied"]) == (200, 1)
        streams = httpx.get(f"{index_url}/v1/cache/streams", trust_env=False).json()["streams"]
        assert {s["instance"] for s in streams} == {"engine-0", "store-0"}
        assert httpx.get(f"{index_url}/lmcache/healthz", trust_env=False).status_code == 200
        metrics = httpx.get(f"{index_url}/metrics", trust_env=False).text
        assert "conductor_index_blocks" in metrics
        assert f'version="{__version__}"' in metrics
        assert "/query" in httpx.get(f"{index_url}/openapi.json", trust_env=False).json()["paths"]
    finally:
        for process in (engine, index):
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=30) == 0
        assert index.stderr is not None
        printed = index.stderr.read().decode()
        index.stderr.close()
    assert "POST /register" in printed
    assert "Traceback" not in printed
