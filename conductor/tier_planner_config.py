"""The planner's part of a configuration, the same for `conductor serve` and for simulations."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from conductor.actions import ActionKind
from conductor.tier_planner import ALL_KINDS, PlannerSettings

_Positive = Annotated[float, Field(gt=0)]


class TierPlannerConfig(BaseModel):
    """Which actions the planner may order, and how often it looks."""

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

    learns_from: Annotated[
        int,
        Field(ge=0, description="Requests before what is dropped and prefetched rests on what was learned."),
    ] = 1_000

    save_interval_s: Annotated[
        _Positive,
        Field(description="With `state_dir`: how often what was learned is saved, besides at the end."),
    ] = 60.0

    @property
    def enabled(self) -> bool:
        return bool(self.actions)

    def settings(self) -> PlannerSettings:
        kinds = ALL_KINDS if self.actions == "all" else frozenset(ActionKind(kind) for kind in self.actions)
        return PlannerSettings(
            kinds=kinds, every_s=self.every_s, hold_s=self.hold_s, learns_from=self.learns_from
        )
