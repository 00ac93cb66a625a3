"""Instances that register themselves for a time to live, and send heartbeats to stay."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from conductor.discovery.roll import Listed, Roll, SourceState
from conductor.instance_config import InstanceConfig

SOURCE: Final = "registration"
_CHECK_S: Final = 0.5


class TakenError(Exception):
    """An instance cannot register under this id or URL; the message says whose it is."""


class NotRegisteredError(Exception):
    """No registration of this id."""


@dataclass(slots=True)
class _Registration:
    config: InstanceConfig
    ttl_s: float
    expires_s: float


class Registrations:
    """A source of the roll. Who is silent for its time to live is withheld; ``forget_after_s`` later it leaves."""

    def __init__(self, roll: Roll, clock: Callable[[], float], *, forget_after_s: float) -> None:
        self._roll = roll
        self._clock = clock
        self._forget_after_s = forget_after_s
        self._held: dict[str, _Registration] = {}
        roll.add_source(SOURCE, "PUT /v1/instances/{id}?ttl_s=")
        roll.heard(SOURCE)

    def register(self, config: InstanceConfig, ttl_s: float) -> bool:
        """Also a heartbeat; False when it was registered like this before. Raises TakenError."""
        before = self._held.get(config.id)
        changes = self._state().changes.total()
        self._held[config.id] = _Registration(config, ttl_s, self._clock() + ttl_s)
        self._tell()
        self._roll.heard(SOURCE)
        refused = self._state().refused.get(config.id)
        if refused is not None:
            if before is None:
                del self._held[config.id]
            else:
                self._held[config.id] = before
            self._tell()
            raise TakenError(refused)
        return self._state().changes.total() > changes

    def heartbeat(self, instance_id: str) -> float:
        """Returns the time to live that begins anew. Raises NotRegisteredError."""
        held = self._held.get(instance_id)
        if held is None:
            raise NotRegisteredError(
                f"instance {instance_id!r} is not registered, or was silent for too long; register it again"
            )
        was_silent = held.expires_s <= self._clock()
        held.expires_s = self._clock() + held.ttl_s
        if was_silent:
            self._tell()
        self._roll.heard(SOURCE)
        return held.ttl_s

    def expires_in_s(self, instance_id: str) -> float | None:
        """None when the instance has no registration; negative when it is silent."""
        held = self._held.get(instance_id)
        return None if held is None else held.expires_s - self._clock()

    def forget(self, instance_id: str) -> None:
        """Whoever called has taken the instance out, or over."""
        if self._held.pop(instance_id, None) is not None:
            self._tell()

    def expire(self) -> None:
        """Withhold those that are silent, and let go those that are silent for too long."""
        now_s = self._clock()
        for instance_id, held in list(self._held.items()):
            if held.expires_s + self._forget_after_s <= now_s:
                del self._held[instance_id]
        if any(held.expires_s <= now_s for held in self._held.values()) or len(self._held) != len(
            self._state().listed
        ):
            self._tell()

    async def expire_forever(self) -> None:
        """Also takes in what another source lets go."""
        while True:
            await asyncio.sleep(_CHECK_S)
            self.expire()
            self._roll.check()

    def _tell(self) -> None:
        now_s = self._clock()
        self._roll.call(
            SOURCE,
            [
                Listed(
                    held.config,
                    withheld=None
                    if held.expires_s > now_s
                    else f"registered for {held.ttl_s:g} s, and no heartbeat since",
                )
                for held in self._held.values()
            ],
        )

    def _state(self) -> SourceState:
        return self._roll.sources[SOURCE]
