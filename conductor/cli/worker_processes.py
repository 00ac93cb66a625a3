"""Starts router workers as processes of their own, starts those again that die, stops them all."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import sys
import time
from pathlib import Path

import structlog

_log = structlog.get_logger(__name__)

_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 5.0
_LIVED_S = 10.0  # after which an end is not put down to the start
_KILL_AFTER_S = 5.0  # beyond the time that streams may take


class WorkerProcesses:
    """One process a listening socket, which stays open here: what waits in it outlives the process.

    A worker also ends by itself when the conductor is gone: its connection to it closes.
    """

    def __init__(
        self, listening: list[socket.socket], conductor: Path, log_level: str, log_format: str
    ) -> None:
        self.starts = dict.fromkeys(range(len(listening)), 0)
        self.killed = dict.fromkeys(range(len(listening)), 0)
        self._listening = listening
        self._arguments = ("--socket", str(conductor), "--log-level", log_level, "--log-format", log_format)
        self._processes: dict[int, asyncio.subprocess.Process] = {}
        self._keepers: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Spawn every worker and a keeper for each; returns before they accept requests."""
        for number in self.starts:
            await self._spawn(number)
        self._keepers = [asyncio.create_task(self._keep(number)) for number in self.starts]

    async def stop(self, grace_s: float) -> None:
        """Let every worker finish its streams for so long, then kill what is left."""
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        running = [process for process in self._processes.values() if process.returncode is None]
        self.signal(signal.SIGTERM)
        if running:
            waits = [asyncio.create_task(process.wait()) for process in running]
            _, late = await asyncio.wait(waits, timeout=grace_s + _KILL_AFTER_S)
            for process in running:
                if process.returncode is None:
                    with contextlib.suppress(ProcessLookupError):
                        process.kill()
            if late:
                await asyncio.wait(late)

    def kill(self, number: int, pid: int) -> None:
        """End a worker that does not answer any more, unless another process has taken its place."""
        process = self._processes.get(number)
        if process is None or process.pid != pid or process.returncode is not None:
            return
        _log.error("router worker does not answer and is killed", worker=number, pid=pid)
        with contextlib.suppress(ProcessLookupError):
            process.kill()
            self.killed[number] += 1

    def signal(self, number: signal.Signals) -> None:
        """Send it to every worker that runs."""
        for process in self._processes.values():
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(number)

    async def _spawn(self, number: int) -> None:
        fd = self._listening[number].fileno()
        # A session of its own: Ctrl-C reaches the conductor only, which then stops the workers in order.
        self._processes[number] = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "conductor.cli.worker", "--number", str(number), "--listen-fd", str(fd),
            *self._arguments,
            stdin=asyncio.subprocess.DEVNULL, pass_fds=(fd,), start_new_session=True,
        )  # fmt: skip
        self.starts[number] += 1

    async def _keep(self, number: int) -> None:
        pause_s = _FIRST_PAUSE_S
        while True:
            started_s = time.monotonic()
            code = await self._processes[number].wait()
            if time.monotonic() - started_s > _LIVED_S:
                pause_s = _FIRST_PAUSE_S
            _log.warning("router worker ended", worker=number, code=code, restart_after_s=pause_s)
            spawned = False
            while not spawned:
                await asyncio.sleep(pause_s)
                pause_s = min(pause_s * 2, _LONGEST_PAUSE_S)
                try:
                    await self._spawn(number)
                    spawned = True
                except OSError as error:  # no memory or no process to be had: there may be soon
                    _log.error(
                        "router worker cannot be started",
                        worker=number,
                        error=str(error),
                        again_after_s=pause_s,
                    )
