"""The shared state in `conductor serve`: joined before the index is made, told of everything after."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import structlog
from fastapi import APIRouter
from prometheus_client import CollectorRegistry

from cache_index import save
from conductor.action_runner import ActionRunner
from conductor.cache_orders import CacheOrders
from conductor.cli.event_feeds import EventFeeds
from conductor.cli.stop_signals import unless_stopped
from conductor.config import Config
from conductor.configuration_faults import ConfigError
from conductor.instance_config import InstanceConfig
from conductor.membership import Membership
from conductor.rest.instances import InstanceOrders
from conductor.scheduler import Scheduler
from conductor.shared_state import (
    Joined,
    RedisLink,
    SharedMembers,
    SharedState,
    SharedStateCollector,
    join,
    make_shared_state_router,
    new_id,
    reachable_url,
)
from conductor.shared_state.leadership import follow_leader
from conductor.tier_planning import TierPlanning

_log = structlog.get_logger(__name__)


@dataclass(slots=True)
class SharedServices:
    """``state`` is None where nothing is shared; then nothing here has an effect."""

    config: Config
    state: SharedState | None = None
    joined: Joined = field(default_factory=Joined)

    def take_snapshot(self) -> Path | None:
        """The index that was taken over; to be read at once, and removed in the end."""
        return self.joined.snapshot

    def members(self, membership: Membership) -> InstanceOrders:
        if self.state is None:
            return membership
        return SharedMembers(membership, self.state.tell, self.state.wall)

    def lead(self, actions: ActionRunner, planning: TierPlanning | None, orders: CacheOrders) -> None:
        if self.state is not None:
            follow_leader(self.state, actions, planning, orders)

    def routers(self, feeds: EventFeeds) -> list[APIRouter]:
        if self.state is None:
            return []
        return [make_shared_state_router(self.state, lambda path: save(feeds.index, path, feeds.paused))]

    def health(self) -> dict[str, Any]:
        return {} if self.state is None else {"shared_state": self.state.status()}

    def measure(self, registry: CollectorRegistry) -> None:
        if self.state is not None:
            registry.register(SharedStateCollector(self.state))

    def start(
        self,
        scheduler: Scheduler,
        membership: Membership,
        url: str,
        configured: Iterable[InstanceConfig],
        feeds: EventFeeds,
    ) -> None:
        if self.state is None:
            return
        given = self.config.shared_state
        assert given.url is not None
        url = given.advertise_url or reachable_url(url, given.url.get_secret_value())
        self.state.start(
            scheduler,
            membership,
            url.rstrip("/"),
            configured,
            lambda: sum(stats.state == "warm" for stats in feeds.stream_stats()),
        )
        _log.info("replica", replica=self.state.replica, url=url, redis=self.state.link.host)

    async def close(self) -> None:
        if self.joined.snapshot is not None:
            self.joined.snapshot.unlink(missing_ok=True)
        if self.state is not None:
            await self.state.close()


async def join_shared_state(
    config: Config, clock: Callable[[], float], stop: asyncio.Event
) -> SharedServices:
    """Take over what the others know, which may take minutes, unless it is to ``stop`` before.

    Raises ConfigError for a URL that cannot be used.
    """
    given = config.shared_state
    if given.url is None:
        return SharedServices(config)
    try:
        link = RedisLink(given.url.get_secret_value(), given.namespace, given.timeout_s)
    except ValueError:
        raise ConfigError(
            "shared_state.url cannot be read; it must look like redis://:PASSWORD@HOST:6379/0"
        ) from None
    token = config.server.admin_token
    headers = {} if token is None else {"authorization": f"Bearer {token.get_secret_value()}"}
    with tempfile.NamedTemporaryFile(prefix="conductor-index-", delete=False) as made:
        path = Path(made.name)
    async with httpx.AsyncClient(trust_env=False) as client:
        joined = await unless_stopped(stop, join(link, client, headers, path)) or Joined()
    if joined.snapshot is None:
        path.unlink(missing_ok=True)
    state = SharedState(given, link, new_id(given.replica), clock, calibrations=joined.shared)
    return SharedServices(config, state, joined)
