"""A call that hangs holds up nobody but who awaits it: no other threads, and not the end of the process."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from conductor.own_thread import in_own_thread

HANGS = """
import asyncio, time
from conductor.own_thread import in_own_thread

async def main():
    hanging = asyncio.create_task(in_own_thread(lambda: time.sleep(600), "hangs"))
    await asyncio.sleep(0.1)
    hanging.cancel()

asyncio.run(main())
print("ended")
"""


async def test_what_the_call_returns_or_raises() -> None:
    assert await in_own_thread(lambda: threading.current_thread().name, "mine") == "mine"
    with pytest.raises(ZeroDivisionError):
        await in_own_thread(lambda: 1 // 0, "mine")


async def test_one_that_hangs_takes_no_thread_of_others() -> None:
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    go = threading.Event()
    hanging = asyncio.create_task(in_own_thread(lambda: go.wait(60), "hangs"))
    async with asyncio.timeout(20):
        assert await asyncio.to_thread(lambda: "free") == "free"
        hanging.cancel()
        with pytest.raises(asyncio.CancelledError):
            await hanging
    go.set()
    await asyncio.sleep(0.05)  # what it returns now is for nobody


def test_the_process_ends_all_the_same() -> None:
    done = subprocess.run((sys.executable, "-c", HANGS), capture_output=True, text=True, timeout=30)
    assert done.stdout == "ended\n", done.stderr
