"""Simultaneous requests assigned to prefill ranks together, by min-cost flow, where that beats one by one.

Each request sends one unit of flow to a rank it could prefill on; a rank's further units cost a mean prefill more
each, for they queue. Assigning together pays only when requests contend for the same ranks; up to 64 requests are
solved in about a millisecond (OR-tools `SimpleMinCostFlow`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from ortools.graph.python import min_cost_flow

from conductor.costs import Floats, Ints
from conductor.costs.tables import DECODE
from conductor.policies import Candidates

MAX_TOGETHER = 64
_COLUMNS = 8  # ranks that each request may go to: its cheapest ones
_SLOTS = 8  # requests of one batch that a rank may take
_UNIT_S = 1e-6  # the flow's costs are integers


@dataclass(frozen=True, slots=True)
class Assignment:
    """Rank position of each request, the order to place them in, and the summed cost in seconds."""

    ranks: list[int]
    order: list[int]
    cost_s: float


@dataclass(frozen=True, slots=True)
class _Problem:
    cost_s: Floats  # [request, rank]: TTFT, delay of others and harm were it alone; inf where it cannot go
    prefill_s: Floats  # [request, rank]: by how much those behind it wait longer


def assign(batch: Sequence[Candidates]) -> Assignment | None:
    """The better of one by one in the given order and all together.

    ``batch`` are 1 to MAX_TOGETHER requests over one roster. None when some request can go nowhere.
    """
    problem = _problem(batch)
    if not np.isfinite(problem.cost_s).any(axis=1).all():
        return None
    greedy = _one_by_one(problem)
    flow = _together(problem)
    if flow is None:
        return greedy
    together = _evaluate(problem, flow)
    return together if together.cost_s < greedy.cost_s else greedy


def _problem(batch: Sequence[Candidates]) -> _Problem:
    # As in `slo`, who would miss an objective costs as much as a TTFT of the whole objective.
    cost_s = np.array(
        [
            c.queue_s
            + c.prefill_s
            + np.where(c.is_mixed, c.wait_s, 0.0)
            + c.inflicted_s
            + c.eviction_s
            + c.harm * c.ttft_objective_s
            for c in batch
        ]
    )
    possible = np.array([c.fits & (c.roles != 0) & (c.roles != DECODE) for c in batch])
    return _Problem(np.where(possible, cost_s, np.inf), np.array([c.prefill_s for c in batch]))


def _one_by_one(problem: _Problem) -> Assignment:
    """Each request where it is cheapest behind those before it."""
    behind_s = np.zeros(problem.cost_s.shape[1])
    ranks, total_s = [], 0.0
    for cost_s, prefill_s in zip(problem.cost_s, problem.prefill_s, strict=True):
        rank = int((cost_s + behind_s).argmin())
        total_s += float(cost_s[rank] + behind_s[rank])
        behind_s[rank] += prefill_s[rank]
        ranks.append(rank)
    return Assignment(ranks, list(range(len(ranks))), total_s)


def _together(problem: _Problem) -> list[int] | None:
    """Ranks of the cheapest flow; None when there is none, too many requests having the same few ranks."""
    requests, size = problem.cost_s.shape
    columns = min(_COLUMNS, size)
    nearest: Ints = np.argpartition(problem.cost_s, columns - 1, axis=1)[:, :columns]
    heads = np.repeat(np.arange(requests), columns)
    tails = nearest.ravel()
    costs = problem.cost_s[heads, tails]
    finite = np.isfinite(costs)
    heads, tails, costs = heads[finite], tails[finite], costs[finite]
    ranks, positions = np.unique(tails, return_inverse=True)
    mean_s = np.array([problem.prefill_s[heads[tails == rank], rank].mean() for rank in ranks])
    source, sink = requests + len(ranks), requests + len(ranks) + 1
    solver = min_cost_flow.SimpleMinCostFlow()
    ones = np.ones(len(heads), np.int64)
    arcs = solver.add_arcs_with_capacity_and_unit_cost(
        heads, requests + positions, ones, np.rint(costs / _UNIT_S).astype(np.int64)
    )
    each = np.arange(requests)
    solver.add_arcs_with_capacity_and_unit_cost(
        np.full(requests, source), each, np.ones(requests, np.int64), np.zeros(requests, np.int64)
    )
    queued = np.tile(np.arange(_SLOTS), len(ranks)) * np.repeat(mean_s, _SLOTS)
    solver.add_arcs_with_capacity_and_unit_cost(
        requests + np.repeat(np.arange(len(ranks)), _SLOTS),
        np.full(len(queued), sink),
        np.ones(len(queued), np.int64),
        np.rint(queued / _UNIT_S).astype(np.int64),
    )
    solver.set_node_supply(source, requests)
    solver.set_node_supply(sink, -requests)
    if solver.solve() != solver.OPTIMAL:
        return None
    used = solver.flows(arcs) > 0
    chosen = np.empty(requests, np.int64)
    chosen[heads[used]] = tails[used]
    result: list[int] = chosen.tolist()
    return result


def _evaluate(problem: _Problem, ranks: list[int]) -> Assignment:
    """The exact cost of an assignment: on each rank the shorter prefills first, which waits least in sum."""
    order = sorted(range(len(ranks)), key=lambda b: problem.prefill_s[b, ranks[b]])
    behind_s = np.zeros(problem.cost_s.shape[1])
    total_s = 0.0
    for b in order:
        total_s += float(problem.cost_s[b, ranks[b]] + behind_s[ranks[b]])
        behind_s[ranks[b]] += problem.prefill_s[b, ranks[b]]
    return Assignment(ranks, order, total_s)
