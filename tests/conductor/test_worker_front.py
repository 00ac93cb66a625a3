"""A front door of several processes says what kept it from starting."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest
from cluster_factory import make_scheduler
from fastapi import FastAPI

from conductor.cli.one_process_front import OneProcessFront
from conductor.cli.worker_front import WorkerFront
from conductor.config import load_config
from conductor.configuration_faults import ConfigError
from router import RouterServices


def front(port: int = 0, workers: int = 2) -> WorkerFront | OneProcessFront:
    config = load_config(flags={"server": {"port": port, "workers": workers}})
    services = RouterServices(make_scheduler("m"))
    return WorkerFront(config, services, {}) if workers > 1 else OneProcessFront(config, services, None)


async def why(opened: WorkerFront | OneProcessFront) -> str:
    try:
        with pytest.raises(ConfigError) as raised:
            await opened.start(FastAPI())
        return str(raised.value)
    finally:
        await opened.stop()
        opened.clear()


@pytest.mark.parametrize("workers", [1, 2])
async def test_an_address_that_is_taken(workers: int) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        said = await why(front(port, workers))
    assert said.startswith(f"cannot listen on 127.0.0.1:{port} (Address already in use)")


async def test_a_folder_that_takes_no_sockets() -> None:
    opened = front()
    opened.clear()  # somebody tidied up
    said = await why(opened)
    assert said.startswith("server.workers: cannot open a Unix socket in ") and "TMPDIR" in said


async def test_a_process_that_cannot_be_started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "missing"))
    said = await why(front())
    assert said == "server.workers: cannot start a router process (No such file or directory)"
