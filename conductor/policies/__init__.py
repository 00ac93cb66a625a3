"""Placement policies: pure choices over estimates, one file each idea, all behind `Policy`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Final

from conductor.policies.aibrix_conductor import AibrixConductor
from conductor.policies.aibrix_prefix_cache import AibrixPrefixCache
from conductor.policies.candidates import Candidates, Choice, Flags, Policy
from conductor.policies.dynamo import Dynamo
from conductor.policies.least_loaded import LeastLoaded, LeastRequests
from conductor.policies.llm_d import LlmD
from conductor.policies.lmetric import LMetric, LMetricPlusOne
from conductor.policies.mooncake import Mooncake, MooncakeLocal
from conductor.policies.preble import Preble
from conductor.policies.prefix_match import PrefixMatch
from conductor.policies.round_robin import RoundRobin
from conductor.policies.slo import Slo
from conductor.policies.smg import Smg
from conductor.policies.uniform import Random

__all__ = ["POLICIES", "Candidates", "Choice", "Flags", "Policy", "make_policy"]

POLICIES: Final[dict[str, Callable[..., Policy]]] = {
    "slo": Slo,
    "mooncake": Mooncake,
    "mooncake_local": MooncakeLocal,
    "lmetric": LMetric,
    "lmetric_plus_one": LMetricPlusOne,
    "dynamo": Dynamo,
    "smg": Smg,
    "llm_d": LlmD,
    "aibrix_conductor": AibrixConductor,
    "aibrix_prefix_cache": AibrixPrefixCache,
    "preble": Preble,
    "prefix_match": PrefixMatch,
    "least_loaded": LeastLoaded,
    "least_requests": LeastRequests,
    "round_robin": RoundRobin,
    "random": Random,
}


def make_policy(name: str, parameters: Mapping[str, object] | None = None, seed: int = 0) -> Policy:
    """The policy of that name; ``parameters`` replace its defaults, ``seed`` is for those that draw lots.

    Raises ValueError for an unknown policy or parameter, naming the known ones, and for a value out of range.
    """
    constructor = POLICIES.get(name)
    if constructor is None:
        raise ValueError(f"unknown policy {name!r}; known: {', '.join(POLICIES)}")
    known = list(inspect.signature(constructor).parameters)
    given = dict(parameters or {})
    if "seed" in known:
        given.setdefault("seed", seed)
    for parameter in parameters or ():
        if parameter not in known:
            takes = f"known: {', '.join(known)}" if known else "it takes none"
            raise ValueError(f"policy {name!r}: unknown parameter {parameter!r}; {takes}")
    try:
        return constructor(**given)
    except ValueError as error:
        raise ValueError(f"policy {name!r}: {error}") from None
