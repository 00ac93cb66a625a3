"""The admission rules by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Final

from conductor.admission.mooncake_rules import AcceptAll, Baseline, Early, EarlyPredicted
from conductor.admission.predicted_rule import Predicted
from conductor.admission.prospect import AdmissionRule, DecodeSpeeds, Prospect, Rejection

__all__ = ["RULES", "AdmissionRule", "DecodeSpeeds", "Prospect", "Rejection", "make_rule"]

_Rule = AcceptAll | Baseline | Early | EarlyPredicted | Predicted

RULES: Final[dict[str, type[_Rule]]] = {
    "accept_all": AcceptAll,
    "baseline": Baseline,
    "early": Early,
    "early_predicted": EarlyPredicted,
    "predicted": Predicted,
}


def make_rule(name: str, parameters: Mapping[str, float] | None = None) -> AdmissionRule:
    """The rule of that name. Raises ValueError naming the known rules, or the parameters that this one has."""
    if name not in RULES:
        raise ValueError(f"unknown admission rule {name!r}; known: {', '.join(RULES)}")
    given = dict(parameters or {})
    known = [field.name for field in fields(RULES[name])]
    for parameter, value in given.items():
        if parameter not in known:
            offered = f"known: {', '.join(known)}" if known else "it has none"
            raise ValueError(f"admission rule {name!r} has no parameter {parameter!r}; {offered}")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{parameter} of admission rule {name!r} must be a number, not {value!r}")
    make: Callable[..., _Rule] = RULES[name]
    return make(**given)
