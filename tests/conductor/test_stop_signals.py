from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator

import pytest

from conductor.cli.stop_signals import on_stop_signal

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    before = {signum: signal.getsignal(signum) for signum in SIGNALS}
    yield
    for signum, handler in before.items():
        signal.signal(signum, handler)


@pytest.mark.parametrize("signum", SIGNALS)
async def test_a_signal_asks_to_stop(signum: signal.Signals) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    stop = asyncio.Event()
    on_stop_signal(stop.set)
    os.kill(os.getpid(), signum)
    await asyncio.wait_for(stop.wait(), 20)
    for each in SIGNALS:
        asyncio.get_running_loop().remove_signal_handler(each)


async def test_a_closed_terminal_is_ignored_where_the_caller_said_so() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    on_stop_signal(lambda: None)
    loop = asyncio.get_running_loop()
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    assert not loop.remove_signal_handler(signal.SIGHUP)
    for each in (signal.SIGINT, signal.SIGTERM):
        loop.remove_signal_handler(each)
