"""What a router answers itself, its health and its metrics; all else of the REST API its conductor does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import orjson
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from router.workers.conductors import Conductors
from router.workers.passing_on import PassedOn


class RouterFront:
    """ASGI application beside the data path."""

    def __init__(self, conductors: Conductors, registry: CollectorRegistry) -> None:
        self._conductors = conductors
        self._registry = registry
        registry.register(ConductorCollector(conductors))
        self._passed_on = PassedOn(None, self._rest_url)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "GET":
            if scope["path"] == "/health":
                await self._health()(scope, receive, send)
                return
            if scope["path"] == "/metrics":
                text = generate_latest(self._registry)
                await Response(text, media_type=CONTENT_TYPE_LATEST)(scope, receive, send)
                return
        await self._passed_on(scope, receive, send)

    def _health(self) -> Response:
        active = self._conductors.active
        conductors = {each.name: each.link is not None for each in self._conductors.conductors}
        answer: dict[str, Any] = {
            "status": "ok",
            "conductor": None if active is None else active.name,
            "conductors": conductors,
        }
        status = 200
        if not self._conductors.local.knows_any:
            status = 503
            answer |= {"status": "unavailable", "reason": "no conductor has told of an instance that is up"}
        return Response(orjson.dumps(answer), status_code=status, media_type="application/json")

    def _rest_url(self) -> str | None:
        active = self._conductors.active
        return None if active is None else active.rest_url()


class ConductorCollector(Collector):
    """Read when it is scraped."""

    def __init__(self, conductors: Conductors) -> None:
        self._conductors = conductors

    def collect(self) -> Iterator[Metric]:
        up = GaugeMetricFamily(
            "conductor_router_conductor_up", "1 while this conductor answers", labels=["conductor"]
        )
        asked = GaugeMetricFamily(
            "conductor_router_conductor_asked", "1 for the conductor that is asked", labels=["conductor"]
        )
        for each in self._conductors.conductors:
            up.add_metric([each.name], float(each.link is not None))
            asked.add_metric([each.name], float(each is self._conductors.active))
        yield from (up, asked)
        yield CounterMetricFamily(
            "conductor_router_failovers",
            "Times that the conductor asked was gone",
            self._conductors.failovers,
        )
        yield CounterMetricFamily(
            "conductor_router_local_placements",
            "Placements made here because no conductor answered",
            self._conductors.local.placements,
        )
