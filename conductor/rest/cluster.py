"""Routes of the cluster as a whole: totals, what was learned of it, and what limits it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, HTTPException, Query, Response

from conductor.costs.calibration import Scale
from conductor.diagnosis import diagnose
from conductor.outcomes import Outcomes
from conductor.overview import overview, snapshot
from conductor.rest import answers
from conductor.scheduler import Scheduler

_Window = Annotated[
    float,
    Query(ge=10, le=Outcomes.WINDOW_S, description="Over how many seconds, up to now."),
]


def make_cluster_routes(scheduler: Scheduler, clock: Callable[[], float]) -> APIRouter:
    """`/cluster`, `/calibration` and `/diagnosis`."""
    router = APIRouter(tags=["cluster"])

    @router.get("/cluster", summary="The cluster in figures", **answers.documented(answers.Cluster, 422))
    async def cluster(window_s: _Window = 120.0) -> Response:
        """Instances by health and role, models, load now; and of the last `window_s` seconds: requests, how
        many met their objectives (TTFT and TBT; `goodput` counts those that met all), and how much of the
        prompts was reused. TBT is a request's mean gap between tokens."""
        return answers.json_answer(overview(scheduler, clock(), window_s))

    @router.get(
        "/calibration",
        summary="What was learned of the instances' speed",
        **answers.documented(answers.Calibrations),
    )
    async def calibration() -> Response:
        """By instance class: the factors that correct predicted prefill times and decode steps, the number of
        observations behind them, and the latest predictions beside what was observed (TTFT and TBT)."""
        return answers.json_answer(_calibrations(scheduler))

    @router.delete(
        "/calibration/{instance_class}",
        summary="Forget what was learned of a class",
        **answers.documented(answers.Calibrations, 404),
    )
    async def reset(instance_class: str) -> Response:
        """Its factors are 1 again; for after a driver or engine update."""
        try:
            scheduler.reset_calibration(instance_class)
        except KeyError:
            known = ", ".join(scheduler.calibrations) or "none"
            raise HTTPException(
                404, f"nothing was learned of the class {instance_class!r}; known: {known}"
            ) from None
        return answers.json_answer(_calibrations(scheduler))

    @router.get(
        "/diagnosis",
        summary="What limits the cluster now",
        **answers.documented(answers.Diagnosis, 422),
    )
    async def diagnosis(window_s: _Window = 120.0) -> Response:
        """Compute, memory capacity, bandwidth, network or scheduling, looked for in this order; every finding
        has its numbers, the limits that they were compared with, how they are known, and a remedy. `limit` is
        the first that holds, null when none does; a finding's `limits` is null when it cannot be told."""
        seen = snapshot(scheduler, clock(), window_s)
        found = diagnose(seen)
        return answers.json_answer({**asdict(found), "window_s": seen.window_s})

    return router


def _calibrations(scheduler: Scheduler) -> dict[str, Any]:
    instances = Counter(instance.instance_class.name for instance in scheduler.cluster)
    return {
        "limits": {"min": 1 / Scale.LIMIT, "max": Scale.LIMIT, "outlier": Scale.OUTLIER},
        "classes": {
            name: {
                "instances": instances[name],
                "prefill": _factor(learned.prefill),
                "decode": _factor(learned.decode),
                "ttft": learned.ttft.summary(),
                "tbt": learned.tbt.summary(),
            }
            for name, learned in scheduler.calibrations.items()
        },
    }


def _factor(scale: Scale) -> dict[str, float | int]:
    return {"factor": scale.factor, "observations": scale.observations}
