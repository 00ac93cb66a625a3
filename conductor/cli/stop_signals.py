"""What asks a service to stop."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable


def on_stop_signal(stop: Callable[[], object]) -> None:
    """Call ``stop`` in the running loop on Ctrl-C, on SIGTERM, and when the terminal is closed (SIGHUP).

    SIGHUP stays ignored where it is, as under nohup; a service with certificates takes it to read them again.
    """
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(signum, stop)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:
        loop.add_signal_handler(signal.SIGHUP, stop)
