"""Placement policies: pure choices over estimates, one file each idea, all behind `Policy`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from conductor.policies.baselines import LeastLoaded, PrefixMatch, Random, RoundRobin
from conductor.policies.candidates import Candidates, Choice, Flags, Policy
from conductor.policies.slo import Slo

__all__ = ["POLICIES", "Candidates", "Choice", "Flags", "Policy", "make_policy"]

POLICIES: Final[dict[str, Callable[[], Policy]]] = {
    "slo": Slo,
    "prefix_match": PrefixMatch,
    "least_loaded": LeastLoaded,
    "round_robin": RoundRobin,
    "random": Random,
}


def make_policy(name: str) -> Policy:
    """The policy of that name. Raises ValueError naming the known ones."""
    if name not in POLICIES:
        raise ValueError(f"unknown policy {name!r}; known: {', '.join(POLICIES)}")
    return POLICIES[name]()
