"""Processes of a highly available front door on loopback: Redis, emulated engines, conductors, routers."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

PASSWORD = "bench"
TOKEN = "bench-admin"
MODEL = "m"
HEADERS = {"authorization": f"Bearer {TOKEN}"}


def free_ports(count: int) -> list[int]:
    """All different."""
    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    ports = [int(probe.getsockname()[1]) for probe in probes]
    for probe in probes:
        probe.close()
    return ports


def answer(url: str, path: str) -> Any:
    """None when nobody does in two seconds."""
    try:
        got = httpx.get(f"{url}{path}", headers=HEADERS, timeout=2.0, trust_env=False)
    except httpx.TransportError:
        return None
    if got.status_code != 200:
        return None
    return got.json() if got.content else {}


class Site:
    """Every process has a name, and can be killed and started again in the same place."""

    def __init__(self, folder: Path, conductors: int, routers: int, engines: int) -> None:
        redis = shutil.which("redis-server")
        if redis is None:
            sys.exit("redis-server is not installed: make redis (Debian: apt-get install redis-server)")
        self._folder = folder
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._commands: dict[str, list[str]] = {}
        self.urls: dict[str, str] = {}
        redis_port, *ports = free_ports(1 + 3 * engines + 2 * conductors + routers)
        self._environment = os.environ | {
            "CONDUCTOR_SHARED_STATE__URL": f"redis://:{PASSWORD}@127.0.0.1:{redis_port}/0",
            "CONDUCTOR_SERVER__ADMIN_TOKEN": TOKEN,
        }
        self._commands["redis"] = [
            redis, "--port", str(redis_port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder),
            "--requirepass", PASSWORD, "--loglevel", "warning",
        ]  # fmt: skip
        python = [sys.executable, "-m"]
        listed = []
        for number in range(engines):
            http, events, replay = (ports.pop() for _ in range(3))
            name = f"engine-{number}"
            self.urls[name] = f"http://127.0.0.1:{http}"
            listed.append(f"{{id: {name}, url: {self.urls[name]!r}}}")
            self._commands[name] = [
                *python, "simulator.emulator", "--port", str(http), "--instance-id", name, "--model", MODEL,
                "--kv-event-port", str(events), "--kv-replay-port", str(replay), "--kv-blocks", "3000",
                "--log-level", "error", "--replay-buffer-steps", "200",
            ]  # fmt: skip
        desks = []
        for number in range(conductors):
            http, desk = ports.pop(), ports.pop()
            desks.append(desk)
            name = f"conductor-{number}"
            self.urls[name] = f"http://127.0.0.1:{http}"
            file = folder / f"{name}.yaml"
            file.write_text(
                f"instances: [{', '.join(listed)}]\nserver: {{routers_port: {desk}}}\nlog: {{level: warning}}\n"
            )
            self._commands[name] = [
                *python, "conductor.cli", "serve", "--config", str(file), "--port", str(http),
            ]  # fmt: skip
        for number in range(routers):
            http, name = ports.pop(), f"router-{number}"
            self.urls[name] = f"http://127.0.0.1:{http}"
            order = desks[number % conductors :] + desks[: number % conductors]
            options = [part for desk in order for part in ("--conductor", f"127.0.0.1:{desk}")]
            self._commands[name] = [
                *python, "conductor.cli", "router", *options, "--port", str(http), "--log-level", "warning",
            ]  # fmt: skip

    def names(self, kind: str) -> list[str]:
        return [name for name in self._commands if name.startswith(kind)]

    def start(self, name: str) -> None:
        with (self._folder / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                self._commands[name], stdout=log, stderr=log, env=self._environment
            )

    def kill(self, name: str) -> None:
        """As kill -9; returns once it is gone."""
        self._processes[name].kill()
        self._processes[name].wait()

    def wait_for(self, condition: Callable[[], object], what: str, within_s: float = 180.0) -> None:
        deadline_s = time.monotonic() + within_s
        while not condition():
            if time.monotonic() > deadline_s:
                logs = "\n".join(
                    f"{path.name}: {path.read_text()[-1500:]}" for path in self._folder.glob("*.log")
                )
                raise RuntimeError(f"{what} did not happen within {within_s:g} s\n{logs}")
            time.sleep(0.05)

    def ready(self, name: str) -> bool:
        health = answer(self.urls[name], "/health") if name in self.urls else {}
        if name.startswith("conductor") and health is not None:
            instances = answer(self.urls[name], "/v1/instances") or {"instances": []}
            up = [each["health"] == "up" for each in instances["instances"]]
            return (
                len(up) == len(self.names("engine")) and all(up) and health["shared_state"]["redis"] == "up"
            )
        if name.startswith("router") and health is not None:
            return all(health["conductors"].values())
        return health is not None

    def leader(self) -> str | None:
        """The conductor that says that it leads."""
        for name in self.names("conductor"):
            health = answer(self.urls[name], "/health") if self._processes[name].poll() is None else None
            if health is not None and health["shared_state"]["leads"]:
                return name
        return None

    def residencies(self, name: str) -> set[tuple[str, str, str]]:
        """All that a conductor believes to be cached."""
        tree = answer(self.urls[name], "/v1/cache/tree?limit=10000") or {"nodes": []}
        if tree.get("sampled"):
            raise RuntimeError("the index is too large to be compared whole")
        return {
            (node["hash"], holder["instance"], holder["tier"])
            for node in tree["nodes"]
            for holder in node["holders"]
        }

    def close(self) -> None:
        for name in reversed(self._processes):
            process = self._processes[name]
            if process.poll() is None:
                process.terminate()
        for process in self._processes.values():
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
