"""The planner's part of a configuration, the same for `conductor serve` and for simulations."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from conductor.actions import ActionKind
from conductor.link_budgets import LinkBudget
from conductor.tier_planner import ALL_KINDS, PlannerSettings

_Positive = Annotated[float, Field(gt=0)]


class TierPlannerConfig(BaseModel):
    """Which actions the planner may order, how often it looks, and what they may take of each link."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    actions: Annotated[
        Literal["all"] | list[ActionKind],
        Field(description="Actions that may be ordered, or all; none: the planner is off."),
    ] = []
    every_s: Annotated[_Positive, Field(description="Seconds between two plans.")] = 1.0
    hold_s: Annotated[
        _Positive,
        Field(description="What was moved stays, and what was dropped stays away, for so many seconds."),
    ] = 60.0
    link_bytes_per_s: Annotated[
        _Positive | None,
        Field(description="Most that actions may move over each link, in each direction; null: no limit."),
    ] = None

    @property
    def enabled(self) -> bool:
        return bool(self.actions)

    def settings(self) -> PlannerSettings:
        kinds = ALL_KINDS if self.actions == "all" else frozenset(ActionKind(kind) for kind in self.actions)
        return PlannerSettings(kinds=kinds, every_s=self.every_s, hold_s=self.hold_s)

    def budget(self) -> LinkBudget:
        """A link may run ahead of its budget by ten seconds' worth."""
        if self.link_bytes_per_s is None:
            return LinkBudget()
        return LinkBudget(bytes_per_s=self.link_bytes_per_s, burst_bytes=10 * self.link_bytes_per_s)
