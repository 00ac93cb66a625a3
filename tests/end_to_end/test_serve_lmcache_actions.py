"""`conductor serve` drives real LMCache servers: they register and report with it, and take its orders."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from front_door_process import FrontDoor, conductor_command, front_door
from lmcache_processes import COMMAND, MODEL, RealServer, bench_prompt, real_servers, reporting_to

pytestmark = [
    pytest.mark.lmcache,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not COMMAND.exists(), reason="LMCache is not installed: make test-lmcache"),
]

STORED = 3
CONFIG = f"""
emulation: {{cluster: "1", model: {MODEL}}}
executors: {{lmcache_servers: {{}}}}
"""


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontDoor]:
    config = tmp_path_factory.mktemp("config") / "cluster.yaml"
    config.write_text(CONFIG)
    with front_door(tmp_path_factory.mktemp("serve"), "--config", str(config)) as started:
        yield started


@pytest.fixture(scope="module")
def servers(door: FrontDoor, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[RealServer]]:
    """The first has stored a prompt of four chunks, which the second reaches in the shared store."""
    flags = reporting_to(f"{door.url}/lmcache")
    folder = tmp_path_factory.mktemp("lmcache")
    with real_servers(["s1", "s2"], folder, *flags) as started, started[1].engine(7, 512):
        started[0].run_engine(STORED, 1100)
        yield started


def cache(door: FrontDoor, *arguments: str) -> Any:
    command = conductor_command("cache", *arguments, "--url", door.url, "--json")
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return json.loads(ran.stdout)


def test_a_prefix_is_prefetched_into_another_servers_memory(
    door: FrontDoor, servers: list[RealServer], tmp_path: Path
) -> None:
    tokens = tmp_path / "tokens.json"
    tokens.write_text(json.dumps(bench_prompt(STORED, 1100)))

    def held() -> dict[str, dict[str, int]]:
        return cache(door, "lookup", "--tokens", f"@{tokens}")["default"]

    door.wait_until(lambda: held().get("lmcache:s1", {}).get("CPU") == 1024, "the first server told", 60)
    assert held().get("lmcache:s2", {}).get("CPU", 0) == 0
    before = servers[1].memory_objects()
    order = ("prefetch", "lmcache:s2/host", "--tokens", f"@{tokens}", "--wait")
    [action] = cache(door, *order)["actions"]
    assert (action["state"], action["executor"], action["blocks_done"]) == ("done", "lmcache-server", 64)
    assert servers[1].memory_objects() == before + 4
    door.wait_until(lambda: held().get("lmcache:s2", {}).get("CPU") == 1024, "the second server told", 60)

    [dropped] = cache(door, "clear", "lmcache:s2/host", "--tokens", f"@{tokens}", "--wait")["actions"]
    assert (dropped["state"], dropped["blocks_done"]) == ("done", 64)
    assert servers[1].memory_objects() == before
