"""Placements made over REST, whose clients may never tell how they ended."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from conductor.scheduler import Scheduler

DEFAULT_TTL_S: Final = 600.0
_CHECK_S: Final = 1.0


class Reservations:
    """Each is released when nothing was reported of it for ``ttl_s`` seconds."""

    def __init__(
        self, scheduler: Scheduler, clock: Callable[[], float], *, ttl_s: float = DEFAULT_TTL_S
    ) -> None:
        self._scheduler = scheduler
        self._clock = clock
        self.ttl_s = ttl_s
        self.expired = 0
        self._expires_s: OrderedDict[str, float] = OrderedDict()  # in the order in which they expire

    def __len__(self) -> int:
        """Those that have not ended."""
        return len(self._expires_s)

    def made(self, placement_id: str) -> None:
        """A placement was made, or reported on."""
        self._expires_s[placement_id] = self._clock() + self.ttl_s
        self._expires_s.move_to_end(placement_id)

    def heard_of(self, placement_id: str) -> None:
        """Progress was reported; placements that were made elsewhere have their own end."""
        if placement_id in self._expires_s:
            self.made(placement_id)

    def ended(self, placement_id: str) -> None:
        self._expires_s.pop(placement_id, None)

    def expire(self) -> None:
        """Release those that are overdue."""
        now_s = self._clock()
        while self._expires_s:
            placement_id, expires_s = next(iter(self._expires_s.items()))
            if expires_s > now_s:
                return
            del self._expires_s[placement_id]
            record = self._scheduler.find(placement_id)
            if record is not None and record.ended_s is None:
                self._scheduler.expired(placement_id, now_s)
                self.expired += 1

    async def expire_forever(self) -> None:
        while True:
            await asyncio.sleep(_CHECK_S)
            self.expire()
