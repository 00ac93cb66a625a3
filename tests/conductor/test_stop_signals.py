from __future__ import annotations

import asyncio
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from conductor.cli.stop_signals import on_stop_signal

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

SERVICE = """
import asyncio, os, signal, sys
from conductor.cli.stop_signals import on_stop_signal

# whatever the tests were started by
signal.signal(signal.SIGHUP, signal.SIG_IGN if "nohup" in sys.argv else signal.SIG_DFL)

async def main():
    stop = asyncio.Event()
    read_again = lambda: print("read again", flush=True)
    on_stop_signal(stop.set, read_again if "reads" in sys.argv else None)
    print("started", flush=True)
    await asyncio.wait_for(stop.wait(), 60)
    print("stopped", flush=True)

for argument in sys.argv[1:]:
    if argument.startswith("/"):
        os.open(argument, os.O_RDWR)
asyncio.run(main())
"""


@contextmanager
def service(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A session of its own, with a controlling terminal where the path of one is given."""
    process = subprocess.Popen(
        [sys.executable, "-c", SERVICE, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"
        yield process
        process.kill()


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    before = {signum: signal.getsignal(signum) for signum in SIGNALS}
    yield
    for signum, handler in before.items():
        signal.signal(signum, handler)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
async def test_a_signal_asks_to_stop(signum: signal.Signals) -> None:
    stop = asyncio.Event()
    on_stop_signal(stop.set)
    os.kill(os.getpid(), signum)
    await asyncio.wait_for(stop.wait(), 20)
    for each in SIGNALS:
        asyncio.get_running_loop().remove_signal_handler(each)


@pytest.mark.parametrize("reads", [(), ("reads",)])
def test_a_closed_terminal_asks_to_stop(reads: tuple[str, ...]) -> None:
    ours, theirs = pty.openpty()
    with service(os.ttyname(theirs), *reads) as process:
        assert process.stdout is not None
        if reads:  # while the terminal is there it was somebody's wish
            process.send_signal(signal.SIGHUP)
            assert process.stdout.readline() == "read again\n"
        os.close(theirs)
        os.close(ours)
        assert process.stdout.readline() == "stopped\n"


def test_under_nohup_a_closed_terminal_ends_nothing() -> None:
    ours, theirs = pty.openpty()
    with service(os.ttyname(theirs), "reads", "nohup") as process:
        os.close(theirs)
        os.close(ours)
        assert process.stdout is not None
        assert process.stdout.readline() == "read again\n"
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "stopped\n"


def test_without_a_terminal_sighup_asks_for_nothing_that_can_be_done() -> None:
    with service() as process:
        assert process.stdout is not None
        process.send_signal(signal.SIGHUP)
        assert "SIGHUP has no effect" in process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "stopped\n"


@pytest.mark.parametrize("before", [signal.SIG_DFL, signal.SIG_IGN])
async def test_a_service_with_keys_or_certificates_reads_them_again_from_the_beginning(
    before: signal.Handlers,
) -> None:
    signal.signal(signal.SIGHUP, before)
    stop, read_again = asyncio.Event(), asyncio.Event()
    on_stop_signal(stop.set, read_again.set)
    os.kill(os.getpid(), signal.SIGHUP)
    await asyncio.wait_for(read_again.wait(), 20)
    assert not stop.is_set()
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
