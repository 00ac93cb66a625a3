"""The C engines and clients of `load/` as processes on a core of their own, and what processes use."""

from __future__ import annotations

import os
import resource
import shutil
import socket
import subprocess
from pathlib import Path
from typing import Any

LOAD = Path(__file__).resolve().parents[1] / "load"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def compiled(folder: Path) -> None:
    """Build the engines and the client. Raises SystemExit without a compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise SystemExit("a C compiler is needed for the engines and clients: install gcc (or cc)")
    for name in ("backend", "client"):
        subprocess.run((compiler, "-O2", "-o", folder / name, LOAD / f"{name}.c"), check=True)


def spawn(core: int, *command: str | Path, **options: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [str(part) for part in command],
        text=True,
        preexec_fn=lambda: os.sched_setaffinity(0, {core}),
        **options,
    )


def family(pid: int) -> list[int]:
    """A process and those that descend from it."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(each for child in children for each in family(int(child)))]


def cpu_seconds(pid: int) -> float:
    """Of a process and its descendants."""
    ticks = 0
    for each in family(pid):
        fields = Path(f"/proc/{each}/stat").read_text().rsplit(")", 1)[1].split()
        ticks += int(fields[11]) + int(fields[12])
    return float(ticks) / os.sysconf("SC_CLK_TCK")


def rss_mb(pid: int) -> float:
    """Of a process and its descendants."""
    pages = sum(int(Path(f"/proc/{each}/statm").read_text().split()[1]) for each in family(pid))
    return pages * resource.getpagesize() / 1e6
