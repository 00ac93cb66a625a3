"""What an LMCache server holds changes where and how fast requests are expected to run."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from front_door_process import FrontDoor, free_port, front_door
from lmcache_server import LMCacheServer
from waiting import wait_for

PROMPT = list(range(1000, 1000 + 2100))  # eight chunks and a piece
CHUNKED = 2048


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


@contextmanager
def _engine() -> Iterator[str]:
    ports = [free_port() for _ in range(3)]
    engine = subprocess.Popen(
        (
            sys.executable, "-m", "simulator.emulator", "--port", str(ports[0]), "--model", "m",
            "--log-level", "error", "--kv-event-port", str(ports[1]), "--kv-replay-port", str(ports[2]),
        )
    )  # fmt: skip
    url = f"http://127.0.0.1:{ports[0]}"
    try:
        wait_for(lambda: _answers(url))
        yield url
    finally:
        engine.send_signal(signal.SIGINT)
        assert engine.wait(timeout=30) == 0


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontDoor]:
    """Two engines: one beside an LMCache server by its address, one that names another server."""
    folder = tmp_path_factory.mktemp("lmcache")
    with _engine() as beside, _engine() as naming:
        config = folder / "cluster.yaml"
        config.write_text(
            f"instances:\n  - {{id: beside, url: '{beside}'}}\n"
            f"  - {{id: naming, url: '{naming}', lmcache_servers: [mp-named]}}\n"
        )
        with front_door(folder, "--config", str(config)) as door:
            yield door


def _placed(door: FrontDoor, prompt: list[int]) -> dict[str, Any]:
    """The explanation of a placement, which has ended by then."""
    answer = door.http.post("/v1/placements", json={"model": "m", "token_ids": prompt})
    assert answer.status_code == 200, answer.text
    placement_id = answer.json()["placement_id"]
    report = door.http.post(f"/v1/placements/{placement_id}/progress", json={"event": "cancelled"})
    assert report.status_code == 200, report.text
    return door.get(f"/v1/placements/{placement_id}")


def _lookup(door: FrontDoor, prompt: list[int], **more: Any) -> dict[str, Any]:
    answer = door.http.post("/v1/cache/lookup", json={"model": "m", "token_ids": prompt, **more})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()["default"]
    return found


def test_a_prompt_on_the_server_of_its_host_is_not_computed_again(door: FrontDoor) -> None:
    before = _placed(door, PROMPT)
    assert before["plan"] == {"segments": [], "computed_tokens": len(PROMPT)}
    with LMCacheServer(f"{door.url}/lmcache", "mp-1") as server:
        server.stored("m", PROMPT)
        after = _placed(door, PROMPT)
        segment = {"start_token": 0, "stop_token": CHUNKED, "holder": "beside", "rank": 0, "tier": "host"}
        assert after["plan"] == {"segments": [segment], "computed_tokens": len(PROMPT) - CHUNKED}
        assert after["predicted"]["prefill_ms"] < before["predicted"]["prefill_ms"] / 2
        found = _lookup(door, PROMPT)
        assert found["beside"]["CPU"] == found["lmcache:mp-1"]["CPU"] == CHUNKED
        assert (found["beside"]["GPU"], found["naming"]["longest_matched"]) == (0, 0)
        server.deleted("m", PROMPT)
        assert _placed(door, PROMPT)["plan"] == before["plan"]
        server.stored("m", PROMPT)
        server.leave()
    assert _placed(door, PROMPT)["plan"] == before["plan"]


def test_an_engine_names_its_servers_where_addresses_differ(door: FrontDoor) -> None:
    prompt = [7, *PROMPT]
    with LMCacheServer(f"{door.url}/lmcache", "mp-named", ip="10.9.9.9") as server:
        server.stored("m", prompt)
        segments = _placed(door, prompt)["plan"]["segments"]
        assert [(s["holder"], s["tier"], s["stop_token"]) for s in segments] == [("naming", "host", CHUNKED)]
        server.leave()


def test_the_cache_routes_tell_of_the_serving_index(door: FrontDoor) -> None:
    """Engines' own caches, and what an LMCache server and the store it shares hold."""
    prompt = [9, *PROMPT]
    body = {"model": "m", "prompt": prompt[:500], "max_tokens": 1}
    answer = door.http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    engine = answer.headers["x-conductor-prefill-instance"]
    wait_for(lambda: _lookup(door, prompt)[engine]["GPU"] == 496)
    with LMCacheServer(f"{door.url}/lmcache", "mp-2") as server:
        server.stored("m", prompt[:600])
        server.stored("m", prompt[:1100], tier="l2", backend="s3", shared=True)
        found = _lookup(door, prompt, block_size=16)
        assert found["beside"]["CPU"] == 512
        assert found["beside"]["DISK"] == found["lmcache-shared:s3"]["DISK"] == 1024
        assert _lookup(door, prompt, instance_id="lmcache:mp-2") == {"lmcache:mp-2": found["lmcache:mp-2"]}
        assert _lookup(door, prompt, cache_salt="s")["beside"]["longest_matched"] == 0
        held = {each["instance"]: each["tiers"] for each in door.get("/v1/cache/occupancy")["holders"]}
        assert held["lmcache:mp-2"] == {"host": 2}
        assert held["lmcache-shared:s3"] == {"remote": 4}
        assert held[engine]["device"] >= 31
        server.leave()
    query = {"model": "m", "block_size": 16, "token_ids": prompt}
    best = door.http.post("/v1/cache/best-holder", json=query).json()["tiers"]["device"]
    assert (best["instance"], best["tokens"]) == (engine, 496)
    assert any(prefix["depth"] == 30 for prefix in door.get("/v1/cache/hot")["prefixes"])
    assert {"/v1/cache/lookup", "/v1/cache/hot"} <= door.get("/openapi.json")["paths"].keys()
    assert door.http.post("/v1/cache/lookup", json={"model": "m"}).status_code in (400, 422)
