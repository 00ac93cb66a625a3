"""Real LMCache servers, each with an engine attached (`lmcache bench server`), over one shared folder as L2.

`LMCACHE_BIN` is the folder of the `lmcache` command (`make test-lmcache` sets it).
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
from front_door_process import free_port

COMMAND = Path(os.environ.get("LMCACHE_BIN", ".venv-lmcache/bin")) / "lmcache"
MODEL = "test-model"  # of the benchmark's engine
_HELLO = 9906
_SHAPE = "(2,256,16,2,64):float16:4"
_QUIET = {"LMCACHE_DISABLE_BANNER": "1", "PYTHONHASHSEED": "0", "HF_HUB_OFFLINE": "1"}


def bench_prompt(sequence: int, tokens: int) -> list[int]:
    """What the benchmark's engine stores as request number ``sequence``."""
    return [sequence] + [_HELLO] * tokens


@dataclass(frozen=True, slots=True)
class RealServer:
    instance_id: str
    url: str
    rpc_url: str
    logs: Path

    def memory_objects(self) -> int:
        """How many objects are in its L1."""
        status = httpx.get(f"{self.url}/status", trust_env=False).json()
        count: int = status["storage_manager"]["l1_managers"]["_default"]["total_object_count"]
        return count

    def clear_memory(self) -> None:
        httpx.post(f"{self.url}/cache/clear", json={"tier": "l1"}, trust_env=False).raise_for_status()

    def run_engine(self, sequence: int, tokens: int) -> None:
        """An engine stores one prompt and reads it back."""
        command = self._bench(sequence, tokens, "--end", str(sequence + 1))
        with _process(command, self.logs) as process:
            assert process.wait(60) == 0, self.logs.read_text()[-2000:]

    @contextmanager
    def engine(self, sequence: int, tokens: int) -> Iterator[None]:
        """An engine that stays; it has stored one prompt."""
        before = self.memory_objects()
        with _process(self._bench(sequence, tokens, "--interval", "3600"), self.logs) as process:
            _wait(process, lambda: self.memory_objects() > before, self.logs)
            yield

    def _bench(self, sequence: int, tokens: int, *more: str) -> list[str]:
        return [
            *(str(COMMAND), "bench", "server", "--mode", "cpu", "--rpc-url", self.rpc_url, "--url", self.url),
            *("--kvcache-shape-spec", _SHAPE, "--num-blocks", "256"),
            *("--num-tokens", str(tokens), "--start", str(sequence), *more),
        ]


@contextmanager
def real_servers(
    names: Sequence[str], folder: Path, *flags: str, told_shared: bool = False
) -> Iterator[list[RealServer]]:
    """They share ``folder`` as L2, and say so if ``told_shared``; they answer when this begins."""
    with ExitStack() as stack:
        started = []
        for name in names:
            rpc, http = free_port(), free_port()
            server = RealServer(
                name, f"http://127.0.0.1:{http}", f"tcp://127.0.0.1:{rpc}", folder / f"{name}.log"
            )
            l2 = json.dumps({"type": "fs", "base_path": str(folder / "l2"), "shared": told_shared})
            command = [
                *(str(COMMAND), "server", "--instance-id", name, "--host", "127.0.0.1", "--port", str(rpc)),
                *("--http-host", "127.0.0.1", "--http-port", str(http), "--disable-metrics"),
                *("--l1-size-gb", "1", "--l1-init-size-gb", "1", "--eviction-policy", "LRU"),
                *("--supported-transfer-mode", "engine_driven", "--l2-adapter", l2, *flags),
            ]
            started.append((stack.enter_context(_process(command, server.logs)), server))
        for process, server in started:
            _wait(process, lambda url=server.url: _answers(url), server.logs)
        yield [server for _, server in started]


@contextmanager
def real_coordinator(folder: Path) -> Iterator[str]:
    """LMCache's own coordinator; its URL."""
    port, logs = free_port(), folder / "coordinator.log"
    command = [str(COMMAND), "coordinator", "--host", "127.0.0.1", "--port", str(port), "--disable-metrics"]
    with _process(command, logs) as process:
        url = f"http://127.0.0.1:{port}"
        _wait(process, lambda: _answers(url, "healthz"), logs)
        yield url


def reporting_to(coordinator_url: str) -> tuple[str, ...]:
    """Flags of servers that tell a coordinator what they hold."""
    return (
        *("--coordinator-url", coordinator_url, "--coordinator-event-reporting"),
        *("--coordinator-advertise-ip", "127.0.0.1"),
    )


@contextmanager
def real_controller(folder: Path) -> Iterator[str]:
    """The classic controller, without workers; its URL."""
    port, logs = free_port(), folder / "controller.log"
    sockets = f'{{"pull": {free_port()}, "reply": {free_port()}}}'
    command = [
        *(str(COMMAND.with_name("lmcache_controller")), "--host", "127.0.0.1", "--port", str(port)),
        *("--monitor-ports", sockets),
    ]
    with _process(command, logs) as process:
        url = f"http://127.0.0.1:{port}"
        _wait(process, lambda: _answers(url, "controller/workers"), logs)
        yield url


def _answers(url: str, path: str = "status") -> bool:
    try:
        return httpx.get(f"{url}/{path}", trust_env=False).is_success
    except httpx.TransportError:
        return False


@contextmanager
def _process(command: list[str], logs: Path) -> Iterator[subprocess.Popen[bytes]]:
    with logs.open("ab") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=os.environ | _QUIET)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait(process: subprocess.Popen[bytes], ready: Callable[[], bool], logs: Path) -> None:
    end_s = time.monotonic() + 90.0
    while not ready():
        assert process.poll() is None, logs.read_text()[-2000:]
        assert time.monotonic() < end_s, logs.read_text()[-2000:]
        time.sleep(0.2)
