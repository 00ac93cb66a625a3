"""The true optimum of a dozen requests, by constraint programming: what bounds and policies can be held against.

Prompts are prefilled one at a time on each instance, without interruption, and decodes cost nothing. A prompt
finds cached whatever any request whose prefill ended before shares with it, on any instance, at no cost. Everything
is rounded up to a tenth of a millisecond.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import Any, Final

import numpy as np
from ortools.sat.python import cp_model

from conductor.costs import InstanceClass
from conductor.placement import Role
from simulator.cluster.specification import ClusterSpec
from simulator.cluster.workload import BLOCK_TOKENS, Request

MOST_REQUESTS: Final = 16
_TICKS_PER_S: Final = 10_000


def optimal_mean_ttft_s(
    cluster: ClusterSpec, requests: Sequence[Request], block_tokens: int = BLOCK_TOKENS
) -> float:
    """Mean time to the end of the prefill, of the best schedule. Raises ValueError for too many requests."""
    model = _Model(cluster, requests, block_tokens)
    for served in model.served:
        model.solver_model.add(served == 1)
    model.solver_model.minimize(sum(model.ends))
    solver = _solved(model.solver_model)
    waits_s = [
        solver.value(end) / _TICKS_PER_S - request.arrival_s
        for end, request in zip(model.ends, requests, strict=True)
    ]
    return float(np.mean(waits_s))


def optimal_in_time(
    cluster: ClusterSpec, requests: Sequence[Request], ttft_s: float, block_tokens: int = BLOCK_TOKENS
) -> int:
    """How many requests can have their prefill done within ``ttft_s``. Raises ValueError for too many requests."""
    model = _Model(cluster, requests, block_tokens)
    for served, end, request in zip(model.served, model.ends, requests, strict=True):
        due = int((request.arrival_s + ttft_s) * _TICKS_PER_S)
        model.solver_model.add(end <= due).only_enforce_if(served)
    model.solver_model.maximize(sum(model.served))
    return round(_solved(model.solver_model).objective_value)


class _Model:
    """Variables of every request: whether it is served, and the tick at which its prefill ends."""

    def __init__(self, cluster: ClusterSpec, requests: Sequence[Request], block_tokens: int) -> None:
        if not 1 <= len(requests) <= MOST_REQUESTS:
            raise ValueError(f"an optimum is found of 1 to {MOST_REQUESTS} requests, not {len(requests)}")
        instances = [i for i in cluster.instances if i.role is not Role.DECODE]
        if any(i.pipeline > 1 for i in instances):
            raise ValueError("pipelines are not modelled; give each instance a pipeline of 1")
        self.solver_model = model = cp_model.CpModel()
        classes = [i.instance_class for i in instances]
        starts_at = [ceil(request.arrival_s * _TICKS_PER_S) for request in requests]
        longest = sum(max(_ticks(c, r.prompt_tokens, 0) for c in classes) for r in requests)
        horizon = starts_at[-1] + longest
        self.served = [model.new_bool_var("") for _ in requests]
        self.starts = [model.new_int_var(at, horizon, "") for at in starts_at]
        self.ends = [model.new_int_var(at, horizon, "") for at in starts_at]
        on: list[list[Any]] = [[] for _ in instances]
        for number, request in enumerate(requests):
            choices = []
            sources = self._sources(number, requests, block_tokens)
            for column, known in enumerate(classes):
                for cached, finds in sources:
                    choice = model.new_bool_var("")
                    duration = _ticks(known, request.prompt_tokens, cached)
                    on[column].append(
                        model.new_optional_interval_var(
                            self.starts[number], duration, self.ends[number], choice, ""
                        )
                    )
                    if finds is not None:
                        model.add_implication(choice, finds)
                    choices.append(choice)
            model.add(sum(choices) == self.served[number])
        for intervals in on:
            model.add_no_overlap(intervals)

    def _sources(
        self, number: int, requests: Sequence[Request], block_tokens: int
    ) -> list[tuple[int, Any | None]]:
        """Cached tokens, and the condition that they are."""
        request, model = requests[number], self.solver_model
        usable = (request.prompt_tokens - 1) // block_tokens
        found: list[tuple[int, Any | None]] = [(0, None)]
        for other, giver in enumerate(requests):
            size = min(usable, len(request.hashes), len(giver.hashes))
            differs = np.flatnonzero(request.hashes[:size] != giver.hashes[:size])
            shared = int(differs[0]) if len(differs) else size
            if other == number or not shared:
                continue
            ended = model.new_bool_var("")
            model.add_implication(ended, self.served[other])
            model.add(self.ends[other] <= self.starts[number]).only_enforce_if(ended)
            found.append((shared * block_tokens, ended))
        return found


def _ticks(known: InstanceClass, prompt_tokens: int, cached_tokens: int) -> int:
    seconds = float(known.prefill_s(prompt_tokens, np.array([cached_tokens]))[0])
    return ceil(max(seconds, known.decode_base_s) * _TICKS_PER_S)


def _solved(model: cp_model.CpModel) -> cp_model.CpSolver:
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    if solver.solve(model) != cp_model.OPTIMAL:
        raise RuntimeError("no optimum was found")
    return solver
