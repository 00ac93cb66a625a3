"""Where a key is configured every route of the application takes one, but for those that the docs name."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster_factory import make_scheduler
from fastapi.routing import APIRoute
from fastapi.testclient import TestClient
from starlette.routing import BaseRoute, Route

from conductor.action_ledger import ActionLedger
from conductor.action_runner import ActionRunner
from conductor.cache_lookup import make_lookup_router
from conductor.cache_orders import CacheOrders
from conductor.cache_rest import make_cache_router
from conductor.cli.access import make_rest_ring
from conductor.cli.event_feeds import EventFeeds
from conductor.config import Config
from conductor.console import make_console_routes
from conductor.engine_caches import EngineCaches
from conductor.executors import DryRunExecutor
from conductor.membership import Membership
from conductor.rest import make_rest_router
from router import RouterServices, create_app

DOCS = Path(__file__).parents[2] / "docs" / "api.md"
KEY = "the-only-key-7e8f"


@pytest.fixture
def app() -> Iterator[Any]:
    """With all the routes that `conductor serve` has."""

    def clock() -> float:
        return 1.0

    scheduler = make_scheduler()
    feeds = EventFeeds(scheduler.index, clock)
    runner = ActionRunner(ActionLedger(), [DryRunExecutor()], clock)
    orders = CacheOrders(runner, scheduler.cluster, scheduler.index, feeds.prompts, clock)
    membership = Membership(scheduler, clock)
    caches = EngineCaches(scheduler.cluster, scheduler.index, feeds.prompts, membership.configs, {})
    made = create_app(
        RouterServices(scheduler),
        keys=make_rest_ring(Config.model_validate({"server": {"admin_token": KEY}}), {}),
        routers=[
            make_rest_router(scheduler, clock, membership=membership, orders=orders, streams=feeds),
            make_cache_router(scheduler.index, feeds),
            make_lookup_router(scheduler.index, feeds.prompts, caches),
            make_console_routes(),
        ],
    )
    for router, prefix in feeds.routers():
        made.include_router(router, prefix=prefix)
    yield made
    feeds.close()


def documented_as_open() -> tuple[str, ...]:
    """The paths that docs/api.md calls open to all."""
    text = DOCS.read_text()
    begin = text.index("Open to all:")
    return tuple(re.findall(r"`(/[\w./]*)`", text[begin : text.index("\n\n", begin)]))


def walked(routes: Iterable[BaseRoute], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Method and path of every route."""
    for route in routes:
        included = getattr(route, "original_router", None)  # as FastAPI keeps a router within another
        if included is not None:
            yield from walked(included.routes, prefix + route.include_context.prefix)  # type: ignore[attr-defined]
            continue
        assert isinstance(route, Route | APIRoute), f"{route} is of a kind that this test does not ask"
        for method in route.methods or ():
            yield method, re.sub(r"\{[^}]+\}", "x", prefix + route.path)


def test_every_route_takes_a_key_but_for_the_documented(app: Any) -> None:
    public = documented_as_open()
    assert set(public) == {"/health", "/metrics", "/docs", "/redoc", "/openapi.json", "/ui"}
    closed, opened = set(), set()
    with TestClient(app) as client:
        for method, path in walked(app.routes):
            is_open = any(path == each or path.startswith(f"{each}/") for each in public)
            is_open |= path == "/v1/models" or path.startswith(
                "/v1/models/"
            )  # inference is open without api_keys
            for headers in ({}, {"authorization": "Bearer wrong"}):
                status = client.request(method, path, headers=headers, follow_redirects=False).status_code
                assert (status == 401) is not is_open, (method, path, status)
            (opened if is_open else closed).add(path)
        for method, path in (("GET", "/v1/problems"), ("DELETE", "/v1/instances/p0"), ("GET", "/v1/actions")):
            allowed = client.request(method, path, headers={"authorization": f"Bearer {KEY}"})
            assert allowed.status_code == 200
    assert len(closed) > 30 and len(opened) >= 8


@pytest.mark.parametrize(
    "path", ["/ui/../v1/placements", "/ui/%2e%2e/v1/placements", "/ui//v1/placements", "//ui"]
)
def test_no_way_leads_around_the_key(app: Any, path: str) -> None:
    with TestClient(app) as client:
        answer = client.get(path)
        assert answer.status_code in (401, 404) and "placements" not in answer.json()
