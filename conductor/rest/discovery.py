"""Route of the sources that instances come from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import APIRouter, Response

from conductor.discovery.roll import Roll, SourceState
from conductor.rest import answers


def make_discovery_routes(roll: Roll, wall_clock: Callable[[], float]) -> APIRouter:
    """`/discovery`."""
    router = APIRouter(prefix="/discovery", tags=["instances"])

    @router.get("", summary="Sources of instances", **answers.documented(answers.Discovery))
    async def discovery() -> Response:
        """What each source lists, what of it was left out and why, and whether it can be heard."""
        now_s = wall_clock()
        return answers.json_answer({"sources": [_describe(each, now_s) for each in roll.sources.values()]})

    return router


def _describe(state: SourceState, now_s: float) -> dict[str, Any]:
    return {
        "source": state.name,
        "reads": state.detail,
        "instances": list(state.listed),
        "refused": state.refused,
        "synced_s_ago": None if state.synced_s is None else round(now_s - state.synced_s, 3),
        "error": state.error,
        "failures": state.failures,
        "changes": dict(state.changes),
    }
