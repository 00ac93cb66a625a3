"""Starts the real `conductor serve` process, waits until it is ready, and stops it as a user would."""

import os
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

START_WITHIN_S = 60.0


_HELD: list[socket.socket] = []


def free_port() -> int:
    """A port that a server may take, once and again, and that no other process is given meanwhile.

    The socket stays bound without listening, which keeps no server with SO_REUSEADDR away.
    """
    holding = socket.socket()
    holding.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holding.bind(("127.0.0.1", 0))
    _HELD.append(holding)
    return int(holding.getsockname()[1])


def conductor_command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "conductor.cli", *arguments]


def children(pid: int) -> list[int]:
    """Processes whose parent is ``pid``."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rsplit(")", 1)[1].split()
        except (OSError, IndexError):
            continue
        if int(fields[1]) == pid and fields[0] != "Z":
            found.append(int(status.parent.name))
    return found


def arguments_of(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_text().split("\0")


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


class FrontDoor:
    """A running `conductor serve`."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        url: str,
        log: Path,
        tls: ssl.SSLContext | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        self.process = process
        self.url = url
        self.log = log
        self.http = httpx.Client(
            base_url=url,
            timeout=60,
            trust_env=False,
            verify=True if tls is None else tls,
            headers=headers,
        )

    def get(self, path: str) -> dict:
        response = self.http.get(path)
        assert response.status_code == 200, response.text
        return response.json()

    def instances(self) -> dict[str, dict]:
        return {i["id"]: i for i in self.get("/v1/instances")["instances"]}

    def all_up(self) -> bool:
        return all(instance["health"] == "up" for instance in self.instances().values())

    def engine_pids(self) -> dict[str, int]:
        """Emulated engines by instance: they go by its name."""
        nurseries = [
            pid for pid in children(self.process.pid) if "simulator.emulator.nursery" in arguments_of(pid)
        ]
        engines = [pid for nursery in nurseries for pid in children(nursery)]
        return {Path(f"/proc/{pid}/comm").read_text().strip(): pid for pid in engines}

    def worker_pids(self) -> dict[str, int]:
        """Router workers by number, from their command lines."""
        return self._children_by("--number")

    def _children_by(self, option: str) -> dict[str, int]:
        pids = {}
        for pid in children(self.process.pid):
            arguments = arguments_of(pid)
            if option in arguments:
                pids[arguments[arguments.index(option) + 1]] = pid
        return pids

    def samples(self) -> dict[str, float]:
        """GET /metrics on a connection of its own: values by name and labels, as they are written there."""
        lines = httpx.get(f"{self.url}/metrics", timeout=60, trust_env=False).text.splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return {name: float(value) for name, value in pairs}

    def wait_until(self, condition, what: str, within_s: float = 20.0) -> None:
        deadline_s = time.monotonic() + within_s
        while not condition():
            assert time.monotonic() < deadline_s, (
                f"{what} did not happen within {within_s} s\n{self.log.read_text()}"
            )
            time.sleep(0.02)

    def stop(self, signum: int = signal.SIGINT) -> int:
        """Ctrl-C; returns the exit code."""
        self.http.close()
        self.process.send_signal(signum)
        return self.process.wait(timeout=30)


@contextmanager
def front_door(
    tmp_path: Path,
    *arguments: str,
    env: dict[str, str] | None = None,
    tls: ssl.SSLContext | None = None,
    headers: dict[str, str] | None = None,
) -> Iterator[FrontDoor]:
    """`conductor serve` with ``arguments`` on a free port, ready to serve; stopped at the end.

    ``tls`` is for asking one that speaks it, ``headers`` are sent with what is asked here.
    """
    port = free_port()
    log = tmp_path / f"serve-{port}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            conductor_command("serve", "--port", str(port), *arguments),
            stdout=output,
            stderr=output,
            env=os.environ | (env or {}),
            start_new_session=True,
        )
    scheme = "http" if tls is None else "https"
    door = FrontDoor(process, f"{scheme}://127.0.0.1:{port}", log, tls, headers)
    try:
        deadline_s = time.monotonic() + START_WITHIN_S
        while True:
            assert process.poll() is None, f"conductor serve ended early\n{log.read_text()}"
            assert time.monotonic() < deadline_s, f"conductor serve was not ready in time\n{log.read_text()}"
            try:
                if door.http.get("/health").status_code == 200 and door.all_up():
                    break
            except httpx.TransportError:
                pass
            time.sleep(0.05)
        yield door
    finally:
        door.http.close()
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
