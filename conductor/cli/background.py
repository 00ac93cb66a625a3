"""Background work of a service: it goes on after a fault of ours, which is in the log, until the service ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from typing import Any, Final

import structlog

_log = structlog.get_logger(__name__)

_PAUSE_S: Final = 1.0


def keep_going(stack: AsyncExitStack, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Begin ``work``, which never ends by itself, until the stack is closed.

    A task that nobody waits for would end with its first exception without a word, and leave, say, reservations
    that never expire.
    """
    stack.callback(asyncio.create_task(_keep_going(work)).cancel)


async def _keep_going(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    while True:
        working = work()
        try:
            await working
            return
        except Exception:
            _log.exception(
                "background work failed and begins again", work=getattr(working, "__qualname__", "")
            )
        await asyncio.sleep(_PAUSE_S)
