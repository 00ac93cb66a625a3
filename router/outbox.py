"""Writes that are made together, behind the callbacks of one turn of the event loop.

Writing to a process of this machine that sleeps takes several times as long as to one that runs, for it is woken.
Engines and clients sleep while this process computes; of writes in a row, only the first finds them so.

While turns have one write each there is nothing to wait for: it is made at once, before what is left to be done.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

import structlog

if TYPE_CHECKING:
    from router.inference import Body

logger = structlog.get_logger("router")

_MOST_WRITES: Final = 16  # that wait for each other
SINGLE_TURNS: Final = 16  # in a row, and the next one is expected to be another
_LONG_BYTES: Final = 128 * 1024  # which take so long that nothing is saved by waiting


class Outbox:
    """Of one event loop. Whoever writes to a transport or closes it himself calls ``flush`` before.

    ``turn`` changes whenever what was written here has been handed to the transports.
    """

    __slots__ = ("_at_once", "_single_turns", "_waiting", "turn")

    def __init__(self) -> None:
        self.turn = 0
        self._waiting: list[tuple[asyncio.WriteTransport, bytes, Body | None]] = []
        self._at_once = 0  # written in this turn of the loop
        self._single_turns = 0  # with one write each, before this one

    def write(self, transport: asyncio.WriteTransport, data: bytes) -> None:
        """Write soon, and in order; not at all when the transport has been closed by then."""
        waiting = self._waiting
        if not waiting:
            asyncio.get_running_loop().call_soon(self._end_turn)
        waiting.append((transport, data, None))
        if len(waiting) >= _MOST_WRITES or len(data) >= _LONG_BYTES:
            self._single_turns = 0
            self.flush()
        elif self._single_turns >= SINGLE_TURNS and not self._at_once:
            self._at_once = 1
            self.flush()

    def write_both(self, transport: asyncio.WriteTransport, data: bytes, more: Body) -> None:
        """Write at once, behind all that waits; ``more`` is long, and not copied."""
        self._waiting.append((transport, data, more))
        self.flush()

    def _end_turn(self) -> None:
        writes = self._at_once + len(self._waiting)
        if writes:  # else another one of this turn was here
            self._single_turns = self._single_turns + 1 if writes == 1 else 0
            self._at_once = 0
            self.flush()

    def flush(self) -> None:
        """Write what waits."""
        waiting = self._waiting
        if not waiting:
            return
        self._waiting = []
        self.turn += 1
        for transport, data, more in waiting:
            try:
                if transport.is_closing():
                    continue
                if more is None:
                    transport.write(data)
                else:
                    transport.writelines((data, more))
            except Exception:  # must not cost the others their writes
                logger.exception("writing failed")
