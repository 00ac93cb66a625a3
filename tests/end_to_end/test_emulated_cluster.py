"""Emulated engines are processes of their own: each may die, all end with the process that they belong to."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from conductor.cli.emulation import EmulatedCluster
from conductor.config import EmulationConfig
from tests.support.waiting import wait_for

ENDS_WITHIN_S = 30.0


def config(**changes: object) -> EmulationConfig:
    return EmulationConfig.model_validate({"cluster": "2", "restart_after_s": 0.1, **changes})


async def answers(cluster: EmulatedCluster) -> bool:
    async with httpx.AsyncClient(trust_env=False) as client:
        for instance in cluster.instances():
            try:
                if (await client.get(f"{instance.url}/health", timeout=2.0)).status_code != 200:
                    return False
            except httpx.TransportError:
                return False
    return True


async def all_answer(cluster: EmulatedCluster) -> None:
    async with asyncio.timeout(60.0):
        while not await answers(cluster):
            await asyncio.sleep(0.1)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


async def test_an_engine_that_is_killed_comes_back_where_it_was() -> None:
    cluster = EmulatedCluster(config())
    await cluster.start()
    try:
        await all_answer(cluster)
        before = cluster.pids()
        os.kill(before["mixed-0"], signal.SIGKILL)
        async with asyncio.timeout(ENDS_WITHIN_S):
            while cluster.pids()["mixed-0"] == before["mixed-0"]:
                await asyncio.sleep(0.05)
        await all_answer(cluster)
        assert cluster.pids()["mixed-1"] == before["mixed-1"]
    finally:
        await cluster.stop()
    assert not any(alive(pid) for pid in cluster.pids().values())


async def test_ports_are_held_for_engines_that_have_not_begun_or_are_away() -> None:
    cluster = EmulatedCluster(config())
    ports = [
        port for engine in cluster.engines for port in (engine.port, engine.event_port, engine.replay_port)
    ]
    for port in ports:
        with socket.socket() as another, pytest.raises(OSError, match="in use"):
            another.bind((cluster.host, port))
    await cluster.stop()
    for port in ports:
        with socket.socket() as another:
            another.bind((cluster.host, port))


async def test_engines_outlive_the_process_that_forks_them() -> None:
    cluster = EmulatedCluster(config())
    await cluster.start()
    try:
        await all_answer(cluster)
        before = cluster.pids()
        os.kill(parent(before["mixed-0"]), signal.SIGKILL)
        async with asyncio.timeout(ENDS_WITHIN_S):
            while set(cluster.pids().values()) & set(before.values()):
                await asyncio.sleep(0.05)
        await all_answer(cluster)
        assert len({parent(pid) for pid in cluster.pids().values()}) == 1
    finally:
        await cluster.stop()


def test_engines_end_with_the_process_that_they_belong_to() -> None:
    program = (
        "import asyncio\n"
        "from conductor.cli.emulation import EmulatedCluster\n"
        "from conductor.config import EmulationConfig\n"
        "async def main():\n"
        "    cluster = EmulatedCluster(EmulationConfig(cluster='2'))\n"
        "    await cluster.start()\n"
        "    print(*cluster.pids().values(), flush=True)\n"
        "    await asyncio.sleep(600)\n"
        "asyncio.run(main())\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        pids = [int(pid) for pid in owner.stdout.readline().split()]
        assert len(pids) == 2
        owner.kill()
    wait_for(lambda: not any(alive(pid) for pid in pids))
