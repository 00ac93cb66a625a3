"""What `conductor top` shows: one look at a running conductor, as its REST API tells it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from conductor.cli.cache_client import ConductorClient


@dataclass(frozen=True, slots=True)
class Figures:
    """``instances`` are rows of `GET /v1/cluster/load` by column; ``actions`` counts those under way by state."""

    cluster: Mapping[str, Any]
    instances: list[dict[str, Any]]
    actions: Mapping[str, int]
    problems: list[dict[str, Any]]

    def document(self) -> dict[str, Any]:
        """For programs."""
        return asdict(self)


def look(client: ConductorClient, window_s: float) -> Figures:
    """Four requests. Raises CacheCommandError."""
    loads = client.get("/v1/cluster/load")
    return Figures(
        cluster=client.get("/v1/cluster", window_s=window_s),
        instances=[dict(zip(loads["fields"], row, strict=True)) for row in loads["instances"]],
        actions=client.get("/v1/actions", limit=1)["counts"],
        problems=client.get("/v1/problems")["problems"],
    )
