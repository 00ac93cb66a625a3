"""Placements without a conductor: the emptier of two instances drawn by lot, by this router's own requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from random import Random
from typing import Final

from conductor.placement import (
    InstanceFailure,
    ModelCard,
    NoInstanceError,
    Placement,
    PlacementRequest,
    PrefixPlan,
    Role,
    Target,
    UnknownModelError,
)
from router.workers.messages import Instances, KnownInstance

AVOIDED_S: Final = 2.0  # an instance that failed, as long as there are others
PREFIX: Final = "local-"  # of the placements' ids

_Rank = tuple[str, int]


class LocalChoice:
    """Knows the instances as a conductor last told them, and what this router has under way on each rank.

    Two at random, and the emptier of them, comes near the emptiest of all without every router choosing that one
    (Mitzenmacher, "The power of two choices in randomized load balancing", 2001).
    """

    def __init__(self, random: Random) -> None:
        self.placements = 0
        self._random = random
        self._told = Instances([], {})
        self._under_way: Counter[_Rank] = Counter()
        self._avoided: dict[str, float] = {}  # until when

    def know(self, told: Instances) -> None:
        """What a conductor tells."""
        self._told = told

    @property
    def knows_any(self) -> bool:
        return bool(self._told.instances)

    def models(self) -> list[ModelCard]:
        counts = Counter(model for each in self._told.instances for model in each.models)
        return [ModelCard(model, None, count) for model, count in counts.items()]

    def place(self, request: PlacementRequest, now_s: float, *, reserve: bool = True) -> Placement:
        """Raises UnknownModelError or NoInstanceError. Without ``reserve`` it is no load and has no id."""
        model = self._told.aliases.get(request.model, request.model)
        serving = [each for each in self._told.instances if model in each.models]
        if not serving:
            served = ", ".join(sorted({m for each in self._told.instances for m in each.models})) or "none"
            raise UnknownModelError(f"the model {request.model!r} is not served here; served: {served}")
        open_ = [each for each in serving if each.targets[0].instance_id not in request.excluded]
        well = [each for each in open_ if self._avoided.get(each.targets[0].instance_id, now_s) <= now_s]
        pair = self._pair(well) or self._pair(open_)
        if pair is None:
            raise NoInstanceError(f"no conductor answers, and no other instance takes {request.model!r} now")
        prefill, decode = pair
        placement_id = ""
        if reserve:
            self.placements += 1
            placement_id = f"{PREFIX}{self.placements}"
        plan = PrefixPlan(0, (), 0.0, 0.0)
        return Placement(placement_id, request.request_id, model, prefill, decode, 0, plan, 0.0, 0.0)

    def began(self, placement: Placement) -> None:
        """A request goes there, whoever chose it."""
        for rank in _ranks(placement):
            self._under_way[rank] += 1

    def ended(self, placement: Placement) -> None:
        for rank in _ranks(placement):
            self._under_way[rank] -= 1
            if self._under_way[rank] <= 0:
                del self._under_way[rank]

    def failed(self, failure: InstanceFailure, now_s: float) -> None:
        """Another one next time."""
        self._avoided[failure.instance_id] = now_s + AVOIDED_S

    def under_way(self, instance_id: str) -> int:
        return sum(count for (name, _), count in self._under_way.items() if name == instance_id)

    def _pair(self, instances: Sequence[KnownInstance]) -> tuple[Target, Target] | None:
        """Where to prefill and to decode; None where that cannot be."""
        mixed = _targets(instances, Role.MIXED)
        if mixed:
            chosen = self._emptier(mixed)
            return chosen, chosen
        decodes = _targets(instances, Role.DECODE)
        protocols = {target.protocol for target in decodes}
        prefills = [t for t in _targets(instances, Role.PREFILL) if t.protocol in protocols]
        if not prefills:
            return None
        prefill = self._emptier(prefills)
        return prefill, self._emptier([t for t in decodes if t.protocol == prefill.protocol])

    def _emptier(self, targets: Sequence[Target]) -> Target:
        two = self._random.sample(targets, min(2, len(targets)))
        return min(two, key=lambda target: self._under_way[(target.instance_id, target.rank)])


def _targets(instances: Sequence[KnownInstance], role: Role) -> list[Target]:
    return [target for each in instances if each.role is role for target in each.targets]


def _ranks(placement: Placement) -> set[_Rank]:
    return {(target.instance_id, target.rank) for target in (placement.prefill, placement.decode)}
