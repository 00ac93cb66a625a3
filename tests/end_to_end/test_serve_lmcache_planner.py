"""The tier planner of `conductor serve` over real LMCache servers: it fills their memories before requests come."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import numpy as np
import pytest
from front_door_process import FrontDoor, free_port, front_door
from lmcache_processes import COMMAND, MODEL, RealServer, bench_prompt, real_servers, reporting_to
from waiting import wait_for

pytestmark = [
    pytest.mark.lmcache,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not COMMAND.exists(), reason="LMCache is not installed: make test-lmcache"),
]

STORED = 5
TOKENS = 1100
CHUNKED = 1024


@contextmanager
def _engine() -> Iterator[str]:
    port, events, replay = free_port(), free_port(), free_port()
    engine = subprocess.Popen(
        (
            sys.executable, "-m", "simulator.emulator", "--port", str(port), "--model", MODEL,
            "--log-level", "error", "--kv-event-port", str(events), "--kv-replay-port", str(replay),
        )
    )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    try:
        wait_for(lambda: _answers(url))
        yield url
    finally:
        engine.send_signal(signal.SIGINT)
        assert engine.wait(timeout=30) == 0


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontDoor]:
    """Two engines, each with an LMCache server of its own."""
    folder = tmp_path_factory.mktemp("serve")
    with _engine() as first, _engine() as second:
        config = folder / "cluster.yaml"
        config.write_text(f"""
instances:
  - {{id: e1, url: "{first}", lmcache_servers: [s1], speeds: {{tiers: {{remote: {{bytes_per_s: 1.0e+10}}}}}}}}
  - {{id: e2, url: "{second}", lmcache_servers: [s2], speeds: {{tiers: {{remote: {{bytes_per_s: 1.0e+10}}}}}}}}
executors: {{lmcache_servers: {{}}}}
tiers:
  capacities:
    - {{instance: "lmcache:s1", tier: host, bytes: 1.0e+10}}
    - {{instance: "lmcache:s2", tier: host, bytes: 1.0e+10}}
tier_planner: {{actions: [prefetch], every_s: 0.1, learns_from: 0}}
""")
        with front_door(folder, "--config", str(config)) as started:
            yield started


@pytest.fixture(scope="module")
def servers(door: FrontDoor, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[RealServer]]:
    """The first has stored a prompt of four chunks, which the second reaches in the shared store."""
    flags = reporting_to(f"{door.url}/lmcache")
    folder = tmp_path_factory.mktemp("lmcache")
    with real_servers(["s1", "s2"], folder, *flags, told_shared=True) as started, started[1].engine(7, 512):
        started[0].run_engine(STORED, TOKENS)
        yield started


def placed(door: FrontDoor, prompt: list[int]) -> dict[str, Any]:
    """The explanation of a placement, which has ended by then."""
    answer = door.http.post("/v1/placements", json={"model": MODEL, "token_ids": prompt})
    assert answer.status_code == 200, answer.text
    placement_id = answer.json()["placement_id"]
    report = door.http.post(f"/v1/placements/{placement_id}/progress", json={"event": "cancelled"})
    assert report.status_code == 200, report.text
    return door.get(f"/v1/placements/{placement_id}")


def held(door: FrontDoor, prompt: list[int]) -> dict[str, dict[str, int]]:
    answer = door.http.post("/v1/cache/lookup", json={"model": MODEL, "token_ids": prompt})
    assert answer.status_code == 200, answer.text
    found: dict[str, dict[str, int]] = answer.json()["default"]
    return found


def test_a_conversation_that_went_elsewhere_is_in_the_new_servers_memory_before_its_next_turn(
    door: FrontDoor, servers: list[RealServer]
) -> None:
    prompt = bench_prompt(STORED, TOKENS)
    door.wait_until(lambda: held(door, prompt).get("lmcache:s1", {}).get("CPU") == CHUNKED, "s1 told", 60)
    door.wait_until(lambda: "lmcache-shared:fs" in held(door, prompt), "s1 told of the store", 60)
    assert held(door, prompt).get("lmcache:s2", {}).get("CPU", 0) == 0
    before = servers[1].memory_objects()

    rng = np.random.default_rng(0)
    others = [rng.integers(0, 30_000, 5 * TOKENS).tolist() for _ in range(6)]
    for turn in range(1, 5):  # so that another conversation is expected to go on, too
        for tokens in others:
            placed(door, tokens[: turn * TOKENS])
    assert door.http.delete("/v1/instances/e1").status_code == 200
    first = placed(door, prompt)
    assert {segment["tier"] for segment in first["plan"]["segments"]} == {"remote"}

    door.wait_until(lambda: servers[1].memory_objects() == before + 4, "the prefetch", 60)
    door.wait_until(lambda: held(door, prompt).get("lmcache:s2", {}).get("CPU") == CHUNKED, "s2 told", 60)
    [action] = [each for each in door.get("/v1/actions")["actions"] if each["blocks_done"]]
    assert (action["kind"], action["state"], action["executor"]) == ("prefetch", "done", "lmcache-server")
    assert "next turn" in action["reason"]
    second = placed(door, [*prompt, *range(300)])
    (segment,) = second["plan"]["segments"]
    assert (segment["holder"], segment["tier"], segment["stop_token"]) == ("e2", "host", CHUNKED)
