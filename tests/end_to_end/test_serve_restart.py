"""`conductor serve` is stopped and started again over engines that go on."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from front_door_process import free_port, front_door
from waiting import wait_for

PROMPT = list(range(100, 260))


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


def _complete(url: str, prompt: list[int]) -> None:
    body = {"model": "m", "prompt": prompt, "max_tokens": 1}
    answer = httpx.post(f"{url}/v1/completions", json=body, trust_env=False)
    assert answer.status_code == 200, answer.text


@pytest.mark.extended
def test_the_index_survives_and_continues(tmp_path: Path) -> None:
    ports = [free_port() for _ in range(3)]
    engine = subprocess.Popen(
        (
            sys.executable, "-m", "simulator.emulator", "--port", str(ports[0]), "--model", "m",
            "--log-level", "error", "--kv-event-port", str(ports[1]), "--kv-replay-port", str(ports[2]),
        )
    )  # fmt: skip
    url = f"http://127.0.0.1:{ports[0]}"
    config = tmp_path / "cluster.yaml"
    config.write_text(
        f"instances: [{{id: e0, url: '{url}'}}]\nstate_dir: {tmp_path / 'state'}\n"
        "index: {max_blocks: 100000, snapshot_interval_s: 3600}\n"
        "tier_planner: {actions: all, save_interval_s: 3600}\n"
    )
    try:
        wait_for(lambda: _answers(url))
        with front_door(tmp_path, "--config", str(config)) as door:
            for number in range(5):
                _complete(door.url, PROMPT + [number] * 32)
            wait_for(lambda: door.get("/v1/cache/tree")["blocks"] == 20)
            assert "conductor_index_max_blocks 100000.0" in door.http.get("/metrics").text
            before = door.get("/v1/cache/streams")["streams"][0]
            assert door.stop(signal.SIGTERM) == 0
        _complete(url, PROMPT + [9] * 32)
        with front_door(tmp_path, "--config", str(config)) as door:
            loaded = [line for line in door.log.read_text().splitlines() if "of reuse is loaded" in line]
            ((requests, blocks),) = [(log["requests"], log["blocks"]) for log in map(json.loads, loaded)]
            assert (requests, blocks) == (5, 20)
            wait_for(lambda: door.get("/v1/cache/tree")["blocks"] == 22)
            after = door.get("/v1/cache/streams")["streams"][0]
            assert after["last_seq"] > before["last_seq"] == before["batches"] - 1
            assert after["batches"] == after["last_seq"] - before["last_seq"]
    finally:
        engine.send_signal(signal.SIGINT)
        assert engine.wait(timeout=30) == 0
