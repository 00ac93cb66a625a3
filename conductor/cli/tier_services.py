"""Tier actions of `conductor serve`: the ledger, its runner, the executors that are configured."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

import httpx
import numpy as np
from numpy.typing import NDArray

from cache_index.lmcache_directory import server_holder
from cache_index.prompt_match import PromptMatcher
from conductor.action_ledger import ActionLedger
from conductor.action_runner import ActionRunner
from conductor.actions import Executor, Prefix
from conductor.cli.background import keep_going
from conductor.cli.event_feeds import EventFeeds
from conductor.cli.tier_sites import TierSites
from conductor.cluster import Cluster
from conductor.config import Config
from conductor.configuration_faults import ConfigError
from conductor.executors import (
    DryRunExecutor,
    EmulatedExecutor,
    LMCacheControllerExecutor,
    LMCacheServerExecutor,
    MooncakeClient,
    MooncakeExecutor,
    MooncakeStore,
)
from conductor.instance_config import InstanceConfig
from conductor.scheduler import Scheduler
from conductor.tier_config import MooncakePoolConfig
from conductor.tier_planner import TierPlanner
from conductor.tier_planning import KeptReturns, TierPlanning
from conductor.tier_room import TierRoom

_CLOSE_GRACE_S = 2.0
_CHECK_S = 1.0
_NO_TOKENS = np.empty(0, np.uint32)


def make_runner(
    config: Config,
    cluster: Cluster,
    feeds: EventFeeds,
    client: httpx.AsyncClient,
    clock: Callable[[], float],
    stack: AsyncExitStack,
    emulated: Sequence[InstanceConfig] = (),
) -> ActionRunner:
    """Not started. ``client`` is for stores; ``stack`` closes what executors hold open. Raises ConfigError.

    ``emulated`` are the engines of the embedded cluster.
    """
    capacities: dict[tuple[str, str], float] = {
        (each.instance, each.tier): each.bytes for each in config.tiers.capacities
    }
    ledger = ActionLedger(
        config.tiers.link_budgets(),
        config.tiers.limits(),
        TierRoom(cluster, feeds.index, capacities).free_bytes,
    )
    executors: list[Executor] = []
    configured = [each for each in config.instances if each.id in config.executors.emulated]
    if emulated or configured:
        hosts = [each.id for each in configured]
        if config.emulation.host_blocks:
            hosts += [each.id for each in emulated]
        urls = {each.id: each.url for each in (*configured, *emulated)}
        executors.append(EmulatedExecutor(client, urls, frozenset(hosts)))
    return ActionRunner(ledger, executors + _executors(config, feeds, client, stack), clock)


async def start_runner(runner: ActionRunner, feeds: EventFeeds, stack: AsyncExitStack) -> None:
    """Begin to carry actions out, until ``stack`` is closed."""
    runner.start()
    stack.push_async_callback(runner.close, _CLOSE_GRACE_S)
    keep_going(stack, partial(_watch_servers, runner, feeds))


async def _watch_servers(runner: ActionRunner, feeds: EventFeeds) -> None:
    """Actions of LMCache servers that left end. Engines are watched by the monitor."""
    known: set[str] = set()
    while True:
        await asyncio.sleep(_CHECK_S)
        now = {server_holder(server.instance_id).instance_id for server in feeds.lmcache.servers()}
        for gone in known - now:
            runner.holder_left(gone)
        known = now


def make_planning(
    config: Config,
    scheduler: Scheduler,
    runner: ActionRunner,
    feeds: EventFeeds,
    clock: Callable[[], float],
    id_prefix: str,
    embedded: Sequence[InstanceConfig] = (),
    reuse: Path | None = None,
) -> TierPlanning | None:
    """None without a planner; it hears of every placement from now on.

    ``reuse`` is the file of what it learned, None: that is not kept.
    """
    if not config.tier_planner.enabled:
        return None
    kept = None if reuse is None else KeptReturns(reuse, config.tier_planner.save_interval_s)
    sites = TierSites(config, scheduler.cluster, feeds, embedded)
    planner = TierPlanner(
        scheduler.cluster,
        scheduler.index,
        (),
        lambda kind, source, target: runner.executor_for(kind, source, target) is not None,
        config.tier_planner.settings(),
        match=partial(_match, feeds.prompts),
        returns=None if kept is None else kept.load(clock()),
        id_prefix=f"{id_prefix}t",
    )
    scheduler.on_placed = planner.placed
    return TierPlanning(planner, runner.ledger, sites.now, clock, kept)


def _match(prompts: PromptMatcher, prefix: Prefix, stop: int) -> NDArray[np.int32]:
    """With what LMCache's servers hold, which only the tokens of a prompt can tell."""
    tokens = _NO_TOKENS if prefix.token_ids is None else prefix.token_ids
    return prompts.match(
        prefix.namespace,
        tokens[: stop * prefix.namespace.block_size],
        cache_salt=prefix.cache_salt,
        hashes=prefix.hashes[:stop],
    )


def _executors(
    config: Config, feeds: EventFeeds, client: httpx.AsyncClient, stack: AsyncExitStack
) -> list[Executor]:
    chosen = config.executors
    executors: list[Executor] = []
    if chosen.lmcache_servers is not None:
        servers = chosen.lmcache_servers
        executors.append(
            LMCacheServerExecutor(
                client,
                feeds.lmcache,
                stored_name=feeds.prompts.stored_name,
                urls=servers.urls,
                coordinator_url=servers.coordinator_url,
                world_size=servers.world_size,
            )
        )
    if chosen.lmcache_controller is not None:
        controller = chosen.lmcache_controller
        executors.append(
            LMCacheControllerExecutor(
                client,
                controller.url,
                controller.instances,
                chunk_tokens=controller.chunk_tokens,
                compression=controller.compression,
            )
        )
    if chosen.mooncake:
        endpoints = {pool.id: pool.mooncake and pool.mooncake.admin_endpoint for pool in config.shared_pools}
        stores = {
            pool: MooncakeStore(
                store.admin_url or endpoints[pool] or "", store.key_format, _copies(pool, store, stack)
            )
            for pool, store in chosen.mooncake.items()
        }
        executors.append(MooncakeExecutor(client, stores, feeds.pools.names_of))
    if chosen.dry_run:
        executors.append(DryRunExecutor())
    return executors


def _copies(pool: str, store: MooncakePoolConfig, stack: AsyncExitStack) -> MooncakeClient | None:
    if store.master is None:
        return None
    try:
        client = MooncakeClient(store.master, host=store.host, protocol=store.protocol, device=store.device)
    except ImportError as error:
        raise ConfigError(
            f"executors.mooncake.{pool}.master needs the store's library ({error}): "
            "pip install 'kv-conductor[mooncake]', or leave master out and nothing is copied"
        ) from None
    stack.callback(client.close)
    return client
