"""Calls that may hang for good, made where nothing else waits for them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

Result = TypeVar("Result")


async def in_own_thread(call: Callable[[], Result], name: str) -> Result:
    """What ``call`` returns or raises, from a thread of this name.

    Unlike the threads of `asyncio.to_thread`, of which there are a few for everybody, and which are waited for when
    the process ends, this one may hang: only who awaits it waits, and whoever is cancelled waits no longer.
    """
    loop = asyncio.get_running_loop()
    told: asyncio.Future[Result] = loop.create_future()

    def settle(tell: Callable[[], None]) -> None:
        if not told.done():  # nobody waits any more
            tell()

    def run() -> None:
        try:
            result = call()
        except BaseException as error:
            tell, outcome = told.set_exception, error
        else:
            tell, outcome = told.set_result, result  # type: ignore[assignment]
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(settle, lambda: tell(outcome))

    threading.Thread(target=run, name=name, daemon=True).start()
    return await told
