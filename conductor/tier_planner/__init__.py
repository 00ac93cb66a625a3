"""The tier planner: which cached prefixes to copy, move, keep and drop before anyone asks."""

from conductor.tier_planner.planner import ALL_KINDS, PlannerSettings, TierPlanner
from conductor.tier_planner.returns import Returns
from conductor.tier_planner.sites import Site

__all__ = ["ALL_KINDS", "PlannerSettings", "Returns", "Site", "TierPlanner"]
