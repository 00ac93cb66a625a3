"""Background work goes on after faults, says so, and ends with its service."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest
from structlog.testing import capture_logs

from conductor.cli import background


async def test_a_fault_does_not_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "_PAUSE_S", 0.0)
    rounds, going = 0, asyncio.Event()

    async def check_forever() -> None:
        nonlocal rounds
        while True:
            await asyncio.sleep(0)
            rounds += 1
            if rounds < 3:
                raise KeyError("what nobody foresaw")
            going.set()

    async with AsyncExitStack() as stack:
        with capture_logs() as logs:
            background.keep_going(stack, check_forever)
            async with asyncio.timeout(10):
                await going.wait()
        assert [each["log_level"] for each in logs] == ["error", "error"]
        assert "check_forever" in logs[0]["work"]
    await asyncio.sleep(0.01)
    ended = rounds
    await asyncio.sleep(0.01)
    assert rounds == ended, "it goes on after the stack is closed"
