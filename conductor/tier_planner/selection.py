"""Which of the actions that would pay are ordered, where sites have no room for all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from conductor.actions import Place
from conductor.tier_planner.outlook import Proposal

MOST: Final = 200  # proposals that are weighed together; of more, those that gain most for their bytes
_SCALE: Final = 1e6  # CP-SAT counts in whole numbers: microseconds
_MIB: Final = 1 << 20
_EFFORT: Final = 0.05  # of CP-SAT's deterministic time: the same answer on every machine

FreeBytes = Callable[[Place], float | None]


def select(proposals: Sequence[Proposal], room: FreeBytes) -> list[Proposal]:
    """The proposals with the greatest gain together that fit, in the order given.

    ``room`` tells the bytes that a target can take, None: without limit. What moves no bytes is always taken. What
    links have room for is the ledger's business.
    """
    still = {id(each) for each in proposals if not each.kv_bytes}
    moving = [each for each in proposals if each.kv_bytes]
    if len(moving) > MOST:
        moving = sorted(moving, key=lambda each: -_gain_s(each) / each.kv_bytes)[:MOST]
    limits = _limits(moving, room)
    over = [limit for limit in limits if sum(each.kv_bytes for each in limit[0]) > limit[1]]
    taken = {id(each) for each in (_best(moving, over) if over else moving)}
    return [each for each in proposals if id(each) in taken or id(each) in still]


def _limits(moving: Sequence[Proposal], room: FreeBytes) -> list[tuple[list[Proposal], float]]:
    """What goes to the same place, and the bytes that it has room for."""
    places = dict.fromkeys(each.target for each in moving)
    limits = [([each for each in moving if each.target == place], room(place)) for place in places]
    return [(group, free) for group, free in limits if free is not None]


def _best(moving: Sequence[Proposal], limits: Sequence[tuple[list[Proposal], float]]) -> list[Proposal]:
    # It brings pandas, a sixth of all that a start imports, and few starts come to where it is needed.
    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    take = {id(each): model.new_bool_var("") for each in moving}
    for group, free in limits:
        used = sum(max(each.kv_bytes // _MIB, 1) * take[id(each)] for each in group)
        model.add(used <= max(int(free) // _MIB, 0))
    model.maximize(sum(round(_gain_s(each) * _SCALE) * take[id(each)] for each in moving))
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.max_deterministic_time = _EFFORT
    status = solver.solve(model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return []
    return [each for each in moving if solver.boolean_value(take[id(each)])]


def _gain_s(proposal: Proposal) -> float:
    return proposal.benefit_s - proposal.cost_s
