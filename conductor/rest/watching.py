"""Routes for those who look again and again: consoles and terminals. Several of them cost as much as one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Annotated, Any, Final

from fastapi import APIRouter, Query, Response

from cache_index import StreamBooks
from conductor.load_table import FIELDS, load_row
from conductor.outcomes import Outcomes
from conductor.overview import history
from conductor.problems import problems
from conductor.rest import answers
from conductor.scheduler import Scheduler

_KEPT_S: Final = 1.0
_AT_ONCE: Final = 50  # instances, between which requests get their turn
_JUDGED_S: Final = 120.0
_MOST_KEPT: Final = 32


class _Kept:
    """Answers of the last second, by what was asked; who asks while one is made gets the same."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._answers: dict[object, tuple[float, asyncio.Future[Response]]] = {}

    async def get(self, asked: object, make: Callable[[], Awaitable[dict[str, Any]]]) -> Response:
        now_s = self._clock()
        kept = self._answers.get(asked)
        if kept is not None and now_s < kept[0] + _KEPT_S:
            return await asyncio.shield(kept[1])
        if len(self._answers) >= _MOST_KEPT:
            self._answers.clear()
        making = asyncio.ensure_future(_made(make))
        self._answers[asked] = (now_s, making)
        return await asyncio.shield(making)


async def _made(make: Callable[[], Awaitable[dict[str, Any]]]) -> Response:
    return answers.json_answer(await make())


def make_watching_routes(
    scheduler: Scheduler, clock: Callable[[], float], streams: StreamBooks | None
) -> APIRouter:
    """`/cluster/load`, `/cluster/history` and `/problems`."""
    router = APIRouter(tags=["cluster"])
    kept = _Kept(clock)

    @router.get(
        "/cluster/load", summary="Every instance's load in a row", **answers.documented(answers.Loads)
    )
    async def load() -> Response:
        """`fields` names the columns of `instances`; sums over an instance's ranks, except the queue (of the rank
        that is free first) and the KV usage (of the fullest). An answer is given for up to a second."""

        async def made() -> dict[str, Any]:
            held = scheduler.index.stats().residencies_by_holder
            rows = []
            for position, instance in enumerate(list(scheduler.cluster), 1):
                rows.append(load_row(instance, held, clock()))
                if position % _AT_ONCE == 0:
                    await asyncio.sleep(0)
            return {"fields": FIELDS, "instances": rows}

        return await kept.get("load", made)

    @router.get(
        "/cluster/history",
        summary="What the cluster did, step by step",
        **answers.documented(answers.History, 422),
    )
    async def steps(
        span_s: Annotated[
            float, Query(ge=60, le=Outcomes.HISTORY_S, description="How far back, in seconds.")
        ] = Outcomes.WINDOW_S,
    ) -> Response:
        """The figures of `window` in `GET /v1/cluster`, oldest step first, the last one under way. Steps have 5
        seconds up to five minutes back, one minute up to an hour, else five. An answer is given for up to a
        second."""

        async def made() -> dict[str, Any]:
            return history(scheduler, clock(), span_s)

        return await kept.get(span_s, made)

    @router.get("/problems", summary="What to look at now", **answers.documented(answers.Problems))
    async def found() -> Response:
        """Instances that are away or suspended, KV events that were missed, requests refused or failing,
        objectives missed, and what limits the cluster; rates are of the last two minutes. An answer is given for
        up to a second."""

        async def made() -> dict[str, Any]:
            stats = () if streams is None else streams.stream_stats()
            listed = problems(scheduler, stats, clock(), _JUDGED_S)
            return {"problems": [asdict(problem) for problem in listed]}

        return await kept.get("problems", made)

    return router
