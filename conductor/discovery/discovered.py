"""The roll with the source that every conductor has, as the REST API takes them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from conductor.discovery.registrations import Registrations
from conductor.discovery.roll import Roll
from conductor.discovery_config import DiscoveryConfig, RegistrationConfig
from conductor.membership import Membership


@dataclass(frozen=True, slots=True)
class Discovered:
    """Times of the wall clock are for people and for metrics; nothing is decided by them."""

    roll: Roll
    registrations: Registrations
    wall_clock: Callable[[], float]

    @classmethod
    def by_registration(
        cls,
        membership: Membership,
        clock: Callable[[], float],
        wall_clock: Callable[[], float] | None = None,
        config: DiscoveryConfig | None = None,
    ) -> Self:
        """No other source yet."""
        config, wall_clock = config or DiscoveryConfig(), wall_clock or clock
        roll = Roll(membership, wall_clock, drain_s=config.drain_s)
        forget_after_s = (config.registration or RegistrationConfig()).forget_after_s
        return cls(roll, Registrations(roll, clock, forget_after_s=forget_after_s), wall_clock)
