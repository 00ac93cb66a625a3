"""Router workers are started again, whatever kept them from running."""

from __future__ import annotations

import asyncio
import shutil
import socket
import sys
from pathlib import Path

import pytest

from conductor.cli.worker_processes import WorkerProcesses


async def test_a_worker_that_could_not_be_started_is_started_when_it_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends_at_once = shutil.which("false")
    assert ends_at_once is not None
    program = tmp_path / "program"
    program.symlink_to(ends_at_once)
    monkeypatch.setattr(sys, "executable", str(program))
    with socket.socket() as listening:
        processes = WorkerProcesses([listening], tmp_path / "placements", "error", "json")
        await processes.start()
        program.unlink()
        await asyncio.sleep(0.4)  # it was tried again, in vain
        started = processes.starts[0]
        program.symlink_to(ends_at_once)
        async with asyncio.timeout(20):
            while processes.starts[0] == started:
                await asyncio.sleep(0.02)
        await processes.stop(0.0)
