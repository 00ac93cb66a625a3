"""What asks a service to stop."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import structlog

_log = structlog.get_logger(__name__)
Result = TypeVar("Result")


def on_stop_signal(stop: Callable[[], object], read_again: Callable[[], object] | None = None) -> None:
    """Call ``stop`` in the running loop on Ctrl-C, on SIGTERM, and when the terminal is closed (SIGHUP).

    SIGHUP stays ignored where it is, as under nohup. Where no terminal was closed it was sent to have something
    read again: a service with keys or certificates does so (``read_again``), also under nohup, and from the
    beginning: they may change while it starts. Others say that they have nothing to read, or, in a terminal, stop.
    """
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(signum, stop)
    ignored, in_terminal = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN, _has_terminal()

    def closed_or_asked() -> None:
        if read_again is None:
            (stop if in_terminal else _say_that_nothing_is_read)()
        elif in_terminal and not ignored and not _has_terminal():
            stop()
        else:
            read_again()

    if read_again is not None or not ignored:
        loop.add_signal_handler(signal.SIGHUP, closed_or_asked)


async def unless_stopped(stop: asyncio.Event, work: Coroutine[Any, Any, Result]) -> Result | None:
    """What ``work`` gives; None when ``stop`` comes first, and the work is given up."""
    working, stopping = asyncio.create_task(work), asyncio.create_task(stop.wait())
    await asyncio.wait((working, stopping), return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if working.done():
        return working.result()
    working.cancel()
    await asyncio.wait((working,))
    return None


def _has_terminal() -> bool:
    try:
        os.close(os.open(os.ctermid(), os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True


def _say_that_nothing_is_read() -> None:
    _log.warning(
        "SIGHUP has no effect: there are no keys and no certificate to read again",
        remedy="restart to read the rest; instances change without one (discovery.file, PUT /v1/instances/{id})",
    )
