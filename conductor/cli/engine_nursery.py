"""The process that forks emulated engines, as `conductor` talks to it (`simulator.emulator.nursery`)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from asyncio.subprocess import PIPE, Process
from dataclasses import dataclass

import orjson


@dataclass(frozen=True, slots=True)
class RunningEngine:
    """``ended`` gets the exit code, the negative number of a signal, or None where the nursery died before."""

    pid: int
    ended: asyncio.Future[int | None]

    def send_signal(self, number: int) -> None:
        """Nothing where it has ended."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)


class EngineNursery:
    """Started with the first engine, and again after it has died."""

    def __init__(self) -> None:
        self._process: Process | None = None
        self._starting = asyncio.Lock()  # after the nursery's death its engines are begun again all at once
        self._reading: asyncio.Task[None] | None = None
        self._beginning: dict[str, asyncio.Future[RunningEngine]] = {}
        self._running: dict[str, RunningEngine] = {}

    async def begin(self, name: str, arguments: list[str]) -> RunningEngine:
        """Fork an engine; none of that name may be running. Raises ConnectionError when the nursery dies."""
        async with self._starting:
            process = self._process or await self._start()
        begun: asyncio.Future[RunningEngine] = asyncio.get_running_loop().create_future()
        self._beginning[name] = begun
        assert process.stdin is not None
        process.stdin.write(orjson.dumps({"name": name, "arguments": arguments}) + b"\n")
        return await begun

    async def _start(self) -> Process:
        # A session of its own: Ctrl-C reaches this process only, which then stops the engines in order.
        command = (sys.executable, "-m", "simulator.emulator.nursery")
        self._process = process = await asyncio.create_subprocess_exec(
            *command, stdin=PIPE, stdout=PIPE, start_new_session=True
        )
        self._reading = asyncio.create_task(self._read(process))
        return process

    async def close(self) -> None:
        """What still runs ends with the nursery."""
        process = self._process
        if process is not None and self._reading is not None:
            assert process.stdin is not None
            process.stdin.close()
            await self._reading
            await process.wait()

    async def _read(self, process: Process) -> None:
        assert process.stdout is not None
        loop = asyncio.get_running_loop()
        async for line in process.stdout:
            report = orjson.loads(line)
            name = report["name"]
            if "pid" in report:
                engine = self._running[name] = RunningEngine(report["pid"], loop.create_future())
                self._beginning.pop(name).set_result(engine)
            else:
                self._running.pop(name).ended.set_result(report["code"])
        self._process = None  # it is gone, even where nobody has been told of its end yet
        for engine in self._running.values():
            engine.ended.set_result(None)
        for begun in self._beginning.values():
            begun.set_exception(ConnectionError("the process that forks emulated engines has died"))
        self._running.clear()
        self._beginning.clear()
