"""Emulated engines as real processes on free ports."""

from __future__ import annotations

import contextlib
import random
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import openai
import pytest

MODEL = "emulated-model"
START_S = 20.0


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on, nor on the next one, which a second rank takes.

    They are below those that the system gives to connections, of which one may come in between.
    """
    found: list[int] = []
    with contextlib.ExitStack() as stack:
        while len(found) < count:
            port = random.randrange(12_000, 30_000)
            pair = [stack.enter_context(socket.socket()) for _ in range(2)]
            with contextlib.suppress(OSError):
                pair[0].bind(("127.0.0.1", port))
                pair[1].bind(("127.0.0.1", port + 1))
                found.append(port)
    return found


@dataclass(frozen=True)
class EmulatorProcess:
    port: int
    event_port: int
    replay_port: int
    process: subprocess.Popen[bytes]
    http: httpx.Client
    model: str = MODEL

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="unused", max_retries=0)

    def metrics(self) -> dict[str, float]:
        """Metric values by name, labels left out."""
        lines = self.http.get("/metrics").text.splitlines()
        pairs = [line.rsplit(" ", 1) for line in lines if not line.startswith("#")]
        return {name.split("{")[0]: float(value) for name, value in pairs}

    def eventually(self, name: str, value: float, within_s: float = 10.0) -> None:
        """Wait until a metric has a value."""
        deadline_s = time.monotonic() + within_s
        while (last := self.metrics()[name]) != value:
            assert time.monotonic() < deadline_s, f"{name} is {last}, not {value}"
            time.sleep(0.02)

    def stop(self) -> int:
        """End the process as a supervisor would; its exit code."""
        self.http.close()
        self.process.terminate()
        try:
            return self.process.wait(timeout=10)
        finally:
            self.process.kill()
            self.process.wait()


def start_emulator(*options: Any) -> EmulatorProcess:
    """A running emulator; tried again if something took one of its ports (or the next, of a second rank)."""
    for _ in range(2):
        with contextlib.suppress(RuntimeError):
            return start_once(*options)
    return start_once(*options)


def start_once(*options: Any) -> EmulatorProcess:
    port, event_port, replay_port = free_ports(3)
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "simulator.emulator", "--model", MODEL, "--port", str(port)),
            *("--kv-event-port", str(event_port), "--kv-replay-port", str(replay_port)),
            *map(str, options),
        ],
    )
    http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30)
    engine = EmulatorProcess(port, event_port, replay_port, process, http)
    deadline_s = time.monotonic() + START_S
    while True:
        with contextlib.suppress(httpx.TransportError):
            if http.get("/health").status_code == 200:
                return engine
        if process.poll() is not None or time.monotonic() > deadline_s:
            engine.stop()
            raise RuntimeError(f"the emulator did not start (exit code {process.returncode})")
        time.sleep(0.02)


@pytest.fixture
def free_port() -> int:
    """A port nobody listens on."""
    return free_ports(1)[0]


@pytest.fixture(scope="session")
def unused_ports() -> Callable[[int], list[int]]:
    """Ports that nobody listens on, as many as asked for."""
    return free_ports


EmulatorFactory = Callable[..., EmulatorProcess]


@pytest.fixture(scope="module")
def emulator() -> Iterator[EmulatorFactory]:
    """Starts emulators that live until the module's tests are done."""
    with contextlib.ExitStack() as stack:

        def start(*options: Any) -> EmulatorProcess:
            engine = start_emulator(*options)
            stack.callback(engine.stop)
            return engine

        yield start


@pytest.fixture(scope="module")
def engine(emulator: EmulatorFactory) -> EmulatorProcess:
    """One emulated engine, shared by a module's tests."""
    return emulator("--speed", 20)


@pytest.fixture
def client(engine: EmulatorProcess) -> Iterator[openai.OpenAI]:
    with engine.client() as client:
        yield client
