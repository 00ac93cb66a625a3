"""Work spread over time as a flow: from jobs to slots of time to the capacity of the instances in them.

Every quantity is a whole number of units: work is rounded down and capacity up, so the flow can do at least what a
cluster can. Jobs reach the slots through a binary tree over them, hence with a number of arcs that grows with the
logarithm of their window, not with its length.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from ortools.graph.python import min_cost_flow

from conductor.costs import Floats, Ints
from simulator.bounds.work import Work

_PRICE_DIGITS = 1e7  # the solver's prices are whole numbers


@dataclass(frozen=True, slots=True)
class Slots:
    """``count`` slots, a power of two, of ``width_s`` from ``start_s`` on."""

    start_s: float
    width_s: float
    count: int

    @property
    def end_s(self) -> float:
        return self.start_s + self.count * self.width_s

    def slot_of(self, at_s: Floats) -> Ints:
        """The slot that a time lies in; the first and the last for times before and after."""
        slot = np.floor((at_s - self.start_s) / self.width_s).astype(np.int64)
        return np.clip(slot, 0, self.count - 1)


@dataclass(frozen=True, slots=True)
class Spans:
    """Aligned spans of slots that windows consist of: arrays of [span]."""

    job: Ints
    node: Ints  # of the tree: 1 is all slots, 2k and 2k + 1 are the halves of k
    start_s: Floats
    width_s: Floats


def spans(slots: Slots, begin_s: Floats, end_s: Floats, fine: int) -> Spans:
    """All slots that windows of time [job] share a moment with, as at least ``fine`` spans of each size in turn.

    Spans double in size the later they are, so their starts are late by a part of the time since ``first``, at
    most 1 / ``fine`` of it; 0 for as few spans as possible.
    """
    first, stop = slots.slot_of(begin_s), slots.slot_of(end_s) + 1
    found = list(_levels(slots.count, first, stop, fine))
    job, node, size = (np.concatenate(column) for column in zip(*found, strict=True))
    start = (node * size - slots.count) * slots.width_s + slots.start_s
    return Spans(job, node, start, size * slots.width_s)


def _levels(count: int, first: Ints, stop: Ints, fine: int) -> Iterator[tuple[Ints, Ints, Ints]]:
    """Jobs, nodes and sizes, from single slots up."""
    low, high, size = first + count, stop + count, 1
    empty = np.empty(0, np.int64)
    yield empty, empty, empty
    while (low < high).any():
        for number in range(fine + 1):
            taken = np.flatnonzero((low < high) & ((low % 2 == 1) | (number < fine)))
            yield taken, low[taken], np.full(len(taken), size)
            low[taken] += 1
        taken = np.flatnonzero((low < high) & (high % 2 == 1))
        high[taken] -= 1
        yield taken, high[taken], np.full(len(taken), size)
        low, high, size = low // 2, high // 2, 2 * size


@dataclass(slots=True)
class SlotFlow:
    """A flow over time, made by `add_prefills` and `add_decodes`, solved by `least_cost`.

    ``unit_s`` is the work that one unit of flow stands for; ``late_s`` how much decode work may at any time be
    left for later slots.
    """

    work: Work
    slots: Slots
    unit_s: float
    late_s: float = 0.0
    _arcs: list[tuple[Ints, Ints, Ints, Ints]] = field(
        default_factory=list
    )  # tails, heads, capacities, costs
    _supplies: list[Ints] = field(default_factory=list)

    def units(self, work_s: Floats) -> Ints:
        return np.floor(work_s / self.unit_s).astype(np.int64)

    def add_prefills(
        self, units: Ints, spans: Spans, widths_s: Floats, price: Floats, unserved: Floats
    ) -> None:
        """``units`` [job] that a span takes within ``widths_s``, one instance's; ``price`` [span] a unit.

        Whatever is never done costs ``unserved`` [job] a unit.
        """
        limit = np.ceil(widths_s * (self.work.fastest / self.unit_s)).astype(np.int64)
        self._add(self._prefill_tree, units, spans, np.minimum(limit, units[spans.job]), price, unserved)

    def add_decodes(self, units: Ints, spans: Spans, price: Floats, unserved: Floats) -> None:
        """As `add_prefills`, but a span may take any number of a job's units."""
        self._add(self._decode_tree, units, spans, units[spans.job], price, unserved)

    def least_cost(self) -> float:
        """Never more than the true optimum. Raises RuntimeError where the solver fails."""
        if not self._supplies:
            return 0.0
        self._add_slots()
        solver = min_cost_flow.SimpleMinCostFlow()
        tails, heads, capacities, costs = (np.concatenate(column) for column in zip(*self._arcs, strict=True))
        solver.add_arcs_with_capacity_and_unit_cost(tails, heads, capacities, costs)
        supplies = np.concatenate(self._supplies)
        solver.set_nodes_supplies(self._jobs + np.arange(len(supplies)), supplies)
        solver.set_node_supply(0, -int(supplies.sum()))
        if (status := solver.solve()) != solver.OPTIMAL:
            raise RuntimeError(f"no flow was found: {status}")
        return float(solver.optimal_cost()) / _PRICE_DIGITS

    # Nodes: the sink, instances that do both by slot, both trees, jobs.
    @property
    def _mixed(self) -> int:
        return 1

    @property
    def _prefill_tree(self) -> int:
        return 1 + self.slots.count

    @property
    def _decode_tree(self) -> int:
        return self._prefill_tree + 2 * self.slots.count

    @property
    def _jobs(self) -> int:
        return self._decode_tree + 2 * self.slots.count

    def _add(
        self, tree: int, units: Ints, spans: Spans, limit: Ints, price: Floats, unserved: Floats
    ) -> None:
        first = self._jobs + sum(len(each) for each in self._supplies)
        jobs = first + np.arange(len(units))
        self._supplies.append(units)
        self._arc(first + spans.job, tree + spans.node, limit, price)
        self._arc(jobs, np.zeros_like(jobs), units, unserved)

    def _add_slots(self) -> None:
        count, work = self.slots.count, self.work
        plenty = np.int64(sum(int(each.sum()) for each in self._supplies))
        inner, slot = np.arange(2, 2 * count), np.arange(count)
        sink = np.zeros(count, np.int64)
        for tree, own in ((self._prefill_tree, work.prefill_only), (self._decode_tree, work.decode_only)):
            leaf = tree + count + slot
            self._arc(tree + inner // 2, tree + inner, plenty)
            if own > 0.0:
                self._arc(leaf, sink, self._capacity(own))
            if work.mixed > 0.0:
                self._arc(leaf, self._mixed + slot, plenty)
        self._arc(self._mixed + slot, sink, self._capacity(work.mixed))
        leaf = self._decode_tree + count + slot
        self._arc(leaf[:-1], leaf[1:], np.int64(np.ceil(self.late_s / self.unit_s)))

    def _capacity(self, speed: float) -> np.int64:
        return np.int64(np.ceil(speed * self.slots.width_s / self.unit_s))

    def _arc(
        self, tails: Ints, heads: Ints, capacities: Ints | np.int64, price: Floats | None = None
    ) -> None:
        costs = np.zeros(len(tails), np.int64) if price is None else (price * _PRICE_DIGITS).astype(np.int64)
        self._arcs.append((tails, heads, np.broadcast_to(capacities, len(tails)), costs))
