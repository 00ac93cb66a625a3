"""Several `conductor serve` over one Redis: one joins late, the leader is killed, Redis is flushed."""

from __future__ import annotations

import contextlib
import http.server
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from front_door_process import FrontDoor, conductor_command, free_port, front_door
from redis_process import PASSWORD, RedisProcess, needs_redis, redis_process
from waiting import wait_for

pytestmark = [needs_redis, pytest.mark.slow, pytest.mark.timeout(240)]

KEY = {"authorization": "Bearer admin-word"}
PROMPT = list(range(100, 260))


@dataclass
class Site:
    redis: RedisProcess
    engine: str
    file: Path

    @property
    def environment(self) -> dict[str, str]:
        return {"CONDUCTOR_SHARED_STATE__URL": self.redis.url}

    def serve(self, folder: Path, *arguments: str):
        folder.mkdir()
        return front_door(folder, "--config", str(self.file), *arguments, env=self.environment, headers=KEY)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """An engine that can replay no more than its last batches, and Redis."""
    folder = tmp_path_factory.mktemp("replicas")
    ports = [free_port() for _ in range(3)]
    engine = subprocess.Popen(
        (
            sys.executable, "-m", "simulator.emulator", "--port", str(ports[0]), "--model", "m",
            "--log-level", "error", "--kv-event-port", str(ports[1]), "--kv-replay-port", str(ports[2]),
            "--replay-buffer-steps", "4", "--speed", "20",
        )
    )  # fmt: skip
    url = f"http://127.0.0.1:{ports[0]}"
    file = folder / "cluster.yaml"
    file.write_text(
        f"instances: [{{id: e0, url: '{url}'}}]\nserver: {{admin_token: admin-word}}\n"
        "shared_state: {lease_s: 1.0, timeout_s: 0.3}\n"
    )

    def answers() -> bool:
        try:
            return httpx.get(f"{url}/health", trust_env=False).status_code == 200
        except httpx.TransportError:
            return False

    try:
        wait_for(answers)
        with redis_process(folder / "redis") as redis:
            yield Site(redis, url, file)
    finally:
        engine.send_signal(signal.SIGINT)
        assert engine.wait(timeout=30) == 0


def complete(door: FrontDoor, prompt: list[int]) -> None:
    answer = door.http.post("/v1/completions", json={"model": "m", "prompt": prompt, "max_tokens": 2})
    assert answer.status_code == 200, answer.text


def tree(door: FrontDoor) -> set[tuple]:
    """All residencies."""
    answer = door.get("/v1/cache/tree?limit=10000")
    assert not answer["sampled"]
    return {
        (node["hash"], node["parent"], holder["instance"], holder["tier"])
        for node in answer["nodes"]
        for holder in node["holders"]
    }


def share(door: FrontDoor) -> dict:
    return door.get("/health")["shared_state"]


def test_a_late_replica_knows_exactly_what_the_first_knows(site: Site, tmp_path: Path) -> None:
    with site.serve(tmp_path / "a") as first:
        for number in range(12):
            complete(first, PROMPT + [number] * 32)
        wait_for(lambda: len(tree(first)) == 10 + 24)
        first.wait_until(lambda: share(first)["leads"], "leading")
        first.wait_until(
            lambda: first.get("/v1/replicas")["replicas"][0]["warm_streams"] == 1, "telling of its index"
        )
        with site.serve(tmp_path / "b") as second:
            second.wait_until(lambda: tree(second) == tree(first), "the same index")
            assert "index taken over" in second.log.read_text()
            complete(second, PROMPT + [77] * 32)
            wait_for(lambda: len(tree(first)) == 36)
            second.wait_until(lambda: tree(second) == tree(first), "the same index after new events")
            assert second.get("/v1/cache/streams")["streams"][0]["gaps"] == 0
            assert PASSWORD not in second.log.read_text() + first.log.read_text()
            unauthorized = httpx.get(f"{first.url}/v1/index/snapshot", trust_env=False)
            assert unauthorized.status_code == 401


@contextmanager
def slow_peer() -> Iterator[tuple[str, threading.Event]]:
    """Its URL, and when it was asked for its index, which it never gives to the end."""
    asked, over = threading.Event(), threading.Event()

    class Answer(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            asked.set()
            with contextlib.suppress(OSError):
                while not over.wait(0.05):
                    self.wfile.write(b"x")

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        over.set()
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_replica_that_is_to_stop_waits_for_no_index(site: Site, tmp_path: Path) -> None:
    shared = site.environment | {"CONDUCTOR_SHARED_STATE__NAMESPACE": "of-their-own"}
    with slow_peer() as (url, asked):
        elsewhere = shared | {"CONDUCTOR_SHARED_STATE__ADVERTISE_URL": url}
        with front_door(tmp_path, "--emulate", "1", env=elsewhere) as first:
            first.wait_until(
                lambda: first.get("/v1/replicas")["replicas"][0]["warm_streams"] == 1, "telling of its index"
            )
            second = subprocess.Popen(
                conductor_command("serve", "--config", str(site.file), "--port", str(free_port())),
                env=os.environ | shared,
                stderr=subprocess.PIPE,
            )
            assert asked.wait(60)
            second.send_signal(signal.SIGTERM)
            _, log = second.communicate(timeout=30)  # twice that would pass before it gave the peer up
            assert second.returncode == 0 and b"index taken over" not in log


@pytest.mark.extended
def test_instances_leaders_and_redis(site: Site, tmp_path: Path) -> None:
    with site.serve(tmp_path / "a") as a, site.serve(tmp_path / "b", "--workers", "2") as b:
        a.wait_until(lambda: share(a)["leads"] or share(b)["leads"], "leading")
        leader, other = (a, b) if share(a)["leads"] else (b, a)
        order = {"model": "m", "token_ids": PROMPT, "target": {"instance": "e0", "tier": "host"}}
        refused = other.http.post("/v1/cache/pin", json=order)
        assert refused.status_code == 409 and share(leader)["replica"] in refused.text
        put = {"url": "http://127.0.0.1:9", "role": "mixed"}
        assert other.http.put("/v1/instances/away", json=put).status_code == 201
        leader.wait_until(lambda: "away" in leader.instances(), "a registration elsewhere")
        site.redis.flush()
        assert leader.http.delete("/v1/instances/away").status_code == 200
        other.wait_until(lambda: "away" not in other.instances(), "a removal elsewhere")
        token = share(leader)["token"]
        leader.process.send_signal(signal.SIGKILL)
        leader.process.wait()
        other.wait_until(lambda: share(other)["leads"], "taking over")
        assert share(other)["token"] > token
        assert other.samples()["conductor_leader"] == 1.0
        site.redis.pause()
        other.wait_until(lambda: share(other)["redis"] == "down", "noticing that Redis stands still")
        began_s = time.monotonic()
        complete(other, PROMPT)
        assert time.monotonic() - began_s < 10.0
        assert other.get("/health")["status"] == "ok"
        site.redis.resume()
        other.wait_until(lambda: share(other)["redis"] == "up", "finding Redis again")
