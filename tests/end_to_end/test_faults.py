"""Engines die under load: nothing hangs, nothing is lost, and what comes back starts clean."""

import json
import os
import signal
import subprocess
from pathlib import Path

import openai
import pytest
from front_door_process import FrontDoor, conductor_command, front_door

MODEL = "emulated-8b"


def _trace(path: Path, requests: int) -> Path:
    """Conversations that share a first block, 20 requests a second."""
    with path.open("w") as trace:
        for i in range(requests):
            hash_ids = [0, 1 + i % 7, 100 + i]
            record = {"timestamp": i * 50, "input_length": 1500, "output_length": 20, "hash_ids": hash_ids}
            trace.write(json.dumps(record) + "\n")
    return path


def _cached(door: FrontDoor, instance: str) -> int:
    return door.instances()[instance]["ranks"][0]["cached_blocks"].get("device", 0)


def test_killing_engines_during_a_replay_loses_nothing(tmp_path: Path) -> None:
    victims = ("prefill-0", "decode-1")
    with front_door(tmp_path, "--emulate", "2p2d", env={"CONDUCTOR_EMULATION__RESTART_AFTER_S": "2"}) as door:
        replay = subprocess.Popen(
            conductor_command(
                "replay", str(_trace(tmp_path / "t.jsonl", 160)), "--url", door.url, "--json", "-"
            ),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for victim in victims:
            door.wait_until(lambda victim=victim: _cached(door, victim) > 200, "a filled cache")
            os.kill(door.engine_pids()[victim], signal.SIGKILL)
            door.wait_until(
                lambda victim=victim: door.instances()[victim]["health"] == "down", "the victim leaving"
            )
            assert _cached(door, victim) == 0, "what the dead engine held is forgotten"
        output, errors = replay.communicate(timeout=60)
        figures = json.loads(output)
        broken = [e for e in figures["errors"] if "the stream broke" not in e]
        assert not broken, f"{broken}\n{errors.decode()}"
        # Only answers whose first bytes had been sent can have broken off; all others were retried.
        assert figures["error_request_count"] <= 16
        assert figures["request_count"] + figures["error_request_count"] == 160
        door.wait_until(door.all_up, "the restarts")
        before = {victim: _cached(door, victim) for victim in victims}
        with openai.OpenAI(base_url=f"{door.url}/v1", api_key="x", max_retries=0) as client:
            for i in range(8):
                client.completions.create(model=MODEL, prompt=[9, i] * 300, max_tokens=2)
        for victim in victims:
            door.wait_until(
                lambda victim=victim: _cached(door, victim) > before[victim], "the restarted engine's events"
            )
        streams = {s["instance"]: s for s in door.get("/v1/cache/streams")["streams"]}
        assert [streams[victim]["state"] for victim in victims] == ["warm", "warm"]
        assert door.get("/v1/placements?limit=1000")["placements"]


def test_with_no_decode_engine_requests_are_refused_with_the_reason(tmp_path: Path) -> None:
    settings = {"CONDUCTOR_EMULATION__RESTART_AFTER_S": "60"}
    with front_door(tmp_path, "--emulate", "1p1d", env=settings) as door:
        os.kill(door.engine_pids()["decode-0"], signal.SIGKILL)
        door.wait_until(lambda: door.instances()["decode-0"]["health"] == "down", "the decode engine leaving")
        assert door.http.get("/health").status_code == 503
        assert "no decode instance" in door.http.get("/health").json()["reason"]
        answer = door.http.post("/v1/completions", json={"model": MODEL, "prompt": "x"})
        assert answer.status_code == 503
        assert "decode-0" in answer.json()["error"]["message"]
        assert answer.headers["retry-after"]


@pytest.mark.extended
def test_a_request_that_waits_for_a_hung_engine_is_answered_by_another(tmp_path: Path) -> None:
    settings = {"CONDUCTOR_HEALTH__TIMEOUT_S": "0.3", "CONDUCTOR_HEALTH__INTERVAL_S": "0.2"}
    with front_door(tmp_path, "--emulate", "2", env=settings) as door:
        body = {"model": MODEL, "prompt": list(range(5, 325)), "max_tokens": 2}
        victim = door.http.post("/v1/completions", json=body).headers["x-conductor-decode-instance"]
        door.wait_until(lambda: _cached(door, victim) >= 20, "the events of the first request")
        pid = door.engine_pids()[victim]
        os.kill(pid, signal.SIGSTOP)
        try:
            answer = door.http.post("/v1/completions", json=body)
        finally:
            os.kill(pid, signal.SIGCONT)
        assert answer.status_code == 200
        assert answer.headers["x-conductor-attempts"] == "2"
        assert answer.headers["x-conductor-decode-instance"] != victim
        door.wait_until(lambda: door.instances()[victim]["health"] == "up", "the engine coming back")


def test_a_client_that_leaves_frees_the_engine(tmp_path: Path) -> None:
    with front_door(tmp_path, "--emulate", "1") as door:
        body = {"model": MODEL, "prompt": "x", "max_tokens": 3000, "ignore_eos": True, "stream": True}
        with door.http.stream("POST", "/v1/completions", json=body) as response:
            received = response.iter_bytes()
            next(received)
            assert door.instances()["mixed-0"]["ranks"][0]["active_decodes"] == 1
        door.wait_until(
            lambda: door.instances()["mixed-0"]["ranks"][0]["active_decodes"] == 0,
            "the release in the scheduler",
        )
        engine_url = door.instances()["mixed-0"]["url"]
        door.wait_until(
            lambda: (
                'num_requests_running{engine="0",model_name="emulated-8b"} 0.0'
                in door.http.get(f"{engine_url}/metrics").text
            ),
            "the engine dropping the request",
        )
        assert door.get("/v1/placements")["placements"][0]["outcome"] == "cancelled"
