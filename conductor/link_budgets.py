"""What background transfers may take of links: bytes per second, and bytes at once, by holder and direction."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from conductor.actions import ActionKind, TierAction

_STILL = (ActionKind.EVICT, ActionKind.PIN, ActionKind.UNPIN)


class Direction(StrEnum):
    """Which way bytes pass a holder."""

    OUT = "out"  # to another holder
    IN = "in"  # from another holder
    WITHIN = "within"  # between its own tiers


class Link(NamedTuple):
    """One direction of one instance or store."""

    instance_id: str
    direction: Direction

    def __str__(self) -> str:
        return f"{self.instance_id} ({self.direction})"


def links_of(action: TierAction) -> tuple[Link, ...]:
    """The links that an action's bytes pass; none where nothing is moved."""
    if action.kind in _STILL:
        return ()
    target = action.target.holder.instance_id
    source = target if action.source is None else action.source.holder.instance_id
    if source == target:
        return (Link(target, Direction.WITHIN),)
    return Link(source, Direction.OUT), Link(target, Direction.IN)


@dataclass(frozen=True, slots=True)
class LinkBudget:
    """A token bucket and a bound on what is under way; None is without limit.

    Of any series of actions those before the last sum up to at most ``burst_bytes`` and ``bytes_per_s`` times
    the time that they took: one that is larger than the burst starts from a full bucket and leaves a debt.
    """

    bytes_per_s: float | None = None
    burst_bytes: float = 0.0
    concurrent_bytes: float | None = None

    def __post_init__(self) -> None:
        if self.bytes_per_s is not None and self.bytes_per_s <= 0:
            raise ValueError(
                f"bytes_per_s must be positive, not {self.bytes_per_s}; leave it out for no limit"
            )
        if self.burst_bytes < 0:
            raise ValueError(f"burst_bytes must not be negative, as {self.burst_bytes} is")
        if self.concurrent_bytes is not None and self.concurrent_bytes <= 0:
            raise ValueError(
                f"concurrent_bytes must be positive, not {self.concurrent_bytes}; leave it out for no limit"
            )


@dataclass(slots=True)
class _Meter:
    tokens: float  # negative: a debt
    at_s: float
    under_way_bytes: int = 0


class LinkBudgets:
    """What is left of every link's budget. ``of`` holds the links with a budget of their own."""

    def __init__(
        self, default: LinkBudget = LinkBudget(), of: Mapping[Link, LinkBudget] | None = None
    ) -> None:
        self._default = default
        self._of = dict(of or {})
        self._meters: dict[Link, _Meter] = {}

    def budget(self, link: Link) -> LinkBudget:
        return self._of.get(link, self._default)

    def never(self, action: TierAction) -> str | None:
        """Why an action can not be started however long it waits."""
        for link in links_of(action):
            limit = self.budget(link).concurrent_bytes
            if limit is not None and action.kv_bytes > limit:
                return f"{action.kv_bytes} bytes are more than {link} may carry at once ({limit:.0f})"
        return None

    def exhausted(self, action: TierAction, now_s: float) -> list[Link]:
        """The links that have no room for it now."""
        return [link for link in links_of(action) if not self._has_room(link, action.kv_bytes, now_s)]

    def begin(self, action: TierAction, now_s: float) -> None:
        for link in links_of(action):
            meter = self._meter(link, now_s)
            meter.under_way_bytes += action.kv_bytes
            if self.budget(link).bytes_per_s is not None:
                meter.tokens -= action.kv_bytes

    def end(self, action: TierAction) -> None:
        for link in links_of(action):
            self._meters[link].under_way_bytes -= action.kv_bytes

    def under_way_bytes(self) -> dict[Link, int]:
        return {link: meter.under_way_bytes for link, meter in self._meters.items() if meter.under_way_bytes}

    def _has_room(self, link: Link, kv_bytes: int, now_s: float) -> bool:
        budget, meter = self.budget(link), self._meter(link, now_s)
        at_once = budget.concurrent_bytes
        if at_once is not None and meter.under_way_bytes + kv_bytes > at_once:
            return False
        return budget.bytes_per_s is None or meter.tokens >= min(kv_bytes, budget.burst_bytes)

    def _meter(self, link: Link, now_s: float) -> _Meter:
        budget, meter = self.budget(link), self._meters.get(link)
        if meter is None:
            meter = self._meters[link] = _Meter(budget.burst_bytes, now_s)
        elif budget.bytes_per_s is not None and now_s > meter.at_s:
            earned = (now_s - meter.at_s) * budget.bytes_per_s
            meter.tokens = min(meter.tokens + earned, budget.burst_bytes)
            meter.at_s = now_s
        return meter
