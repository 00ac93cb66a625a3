"""Whether figures come in the order that a source has them in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from simulator.experiments.experiment_file import Experiment, OrderSection
from simulator.experiments.figures import FIGURES
from simulator.experiments.point import Figures, Point

Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class CheckedOrder:
    """``ours`` are the values of the order's label with their figures, least first, of points with ``labels``."""

    order: OrderSection
    labels: Labels  # all others, which these points have in common
    ours: tuple[tuple[str, float], ...]

    @property
    def expected(self) -> tuple[str, ...]:
        """The source's order of those that were simulated."""
        present = dict(self.ours)
        return tuple(value for value in self.order.ascending if value in present)

    @property
    def holds(self) -> bool:
        """Equal figures are in either order."""
        present = dict(self.ours)
        return all(present[one] <= present[other] for one, other in pairwise(self.expected))


def check_orders(
    experiment: Experiment, points: Sequence[Point], figures: Sequence[Figures]
) -> list[CheckedOrder]:
    """Each order in every group of points that differ in its label only, two at least with the figure.

    Where clusters have policies of their own, these differ with them.
    """
    checked = []
    for order in experiment.orders:
        groups: dict[Labels, dict[str, float]] = {}
        for point, each in zip(points, figures, strict=True):
            labels = dict(point.labels)
            value = FIGURES[order.figure].value(each)
            name = labels.pop(order.label, None)
            if experiment.policies is None:
                labels.pop("policy", None)
            if name in order.ascending and value is not None and order.where.items() <= labels.items():
                groups.setdefault(tuple(labels.items()), {})[name] = value
        checked += [
            CheckedOrder(order, labels, tuple(sorted(found.items(), key=lambda each: each[1])))
            for labels, found in groups.items()
            if len(found) > 1
        ]
    return checked
