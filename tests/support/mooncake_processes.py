"""A real Mooncake master with nodes, over TCP on loopback.

`MOONCAKE_BIN` is the folder of `mooncake_master` and of the interpreter with its library (`make test-mooncake`).
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from front_door_process import free_port

FOLDER = Path(os.environ.get("MOONCAKE_BIN", ".venv-mooncake/bin"))
NODE = Path(__file__).with_name("mooncake_node.py")


@dataclass(frozen=True, slots=True)
class RealMaster:
    rpc: str
    admin_url: str
    logs: Path

    @contextmanager
    def node(self, keys: Sequence[str] = ()) -> Iterator[str]:
        """A node that holds these objects; its segment's name."""
        address = f"127.0.0.1:{free_port()}"
        command = [str(FOLDER / "python"), str(NODE), self.rpc, address, *keys]
        with ExitStack() as stack:
            logs = stack.enter_context(self.logs.open("ab"))
            process = stack.enter_context(
                subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=logs)
            )
            stack.callback(process.kill)
            assert process.stdout is not None
            for line in process.stdout:  # among the library's own
                if line.strip() == b"ready":
                    break
            else:
                raise AssertionError(self.logs.read_text(errors="replace")[-2000:])
            yield address

    def replicas(self, key: str) -> int:
        """How many replicas of an object are in memory."""
        answer = self._get(f"/batch_query_keys?keys={key}")["data"][key]
        return len(answer["values"] or ())

    def segment_bytes(self, segment: str) -> int:
        segments = self._get("/get_segments_detail")["segments"]
        return next(int(s["allocator_used_bytes"]) for s in segments if s["segment_name"] == segment)

    def _get(self, path: str) -> Any:
        return httpx.get(self.admin_url + path, trust_env=False).raise_for_status().json()


@contextmanager
def real_master(folder: Path) -> Iterator[RealMaster]:
    rpc, admin = free_port(), free_port()
    master = RealMaster(f"127.0.0.1:{rpc}", f"http://127.0.0.1:{admin}", folder / "mooncake.log")
    command = [
        *(str(FOLDER / "mooncake_master"), "--rpc_address=127.0.0.1", f"--rpc_port={rpc}"),
        *("--metrics_host=127.0.0.1", f"--metrics_port={admin}"),
    ]
    with master.logs.open("ab") as logs:
        process = subprocess.Popen(command, stdout=logs, stderr=logs)
    try:
        end_s = time.monotonic() + 60.0
        while not _answers(master.admin_url):
            assert process.poll() is None, master.logs.read_text(errors="replace")[-2000:]
            assert time.monotonic() < end_s, master.logs.read_text(errors="replace")[-2000:]
            time.sleep(0.1)
        yield master
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", trust_env=False).is_success
    except httpx.TransportError:
        return False
