"""The conductor's REST API under /v1: placements and why, instances, the cluster, orders for its caches."""

from __future__ import annotations

from collections.abc import Callable

from fastapi import APIRouter

from cache_index import StreamBooks
from conductor.cache_orders import CacheOrders
from conductor.discovery.discovered import Discovered
from conductor.membership import Membership
from conductor.rest.cache_orders import make_action_routes, make_cache_order_routes
from conductor.rest.cluster import make_cluster_routes
from conductor.rest.discovery import make_discovery_routes
from conductor.rest.instances import InstanceOrders, make_instance_routes
from conductor.rest.placements import make_placement_routes
from conductor.rest.prompts import Tokenize, TokenizedPrompt
from conductor.rest.reservations import Reservations
from conductor.rest.watching import make_watching_routes
from conductor.scheduler import Scheduler

__all__ = ["Reservations", "Tokenize", "TokenizedPrompt", "make_rest_router"]


def make_rest_router(
    scheduler: Scheduler,
    clock: Callable[[], float],
    *,
    reservations: Reservations | None = None,
    membership: Membership | None = None,
    members: InstanceOrders | None = None,
    tokenize: Tokenize | None = None,
    orders: CacheOrders | None = None,
    streams: StreamBooks | None = None,
    discovered: Discovered | None = None,
) -> APIRouter:
    """All routes. They read the scheduler's state in place, on its event loop, and never block.

    Without ``tokenize`` prompts must come as token ids or hashes; without ``orders`` nothing is moved; without
    ``discovered`` instances come over these routes only. Of ``streams`` it is told when they miss events.
    ``members`` carries out orders about instances in the place of ``membership``.
    """
    if reservations is None:  # an empty one is false
        reservations = Reservations(scheduler, clock)
    router = APIRouter(prefix="/v1")
    router.include_router(make_placement_routes(scheduler, clock, reservations, tokenize))
    membership = membership or Membership(scheduler, clock)
    discovered = discovered or Discovered.by_registration(membership, clock)
    router.include_router(
        make_instance_routes(scheduler, clock, members or membership, discovered.registrations)
    )
    router.include_router(make_discovery_routes(discovered.roll, discovered.wall_clock))
    router.include_router(make_cluster_routes(scheduler, clock))
    router.include_router(make_watching_routes(scheduler, clock, streams))
    if orders is not None:
        router.include_router(make_cache_order_routes(orders, scheduler.cluster, tokenize))
        router.include_router(make_action_routes(orders, clock))
    return router
