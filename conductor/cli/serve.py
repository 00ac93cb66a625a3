"""`conductor serve`: index, conductor and router in one process, over real engines or an emulated cluster."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import httpx
import structlog
import typer
import uvloop
from rich.console import Console
from rich.table import Table

from cache_index import Holder, LoadStat, SglangLoadFeeds
from conductor import __version__
from conductor.action_metrics import ActionCollector
from conductor.action_runner import ActionRunner
from conductor.admission_metrics import AdmissionCollector
from conductor.build_info import BuildCollector
from conductor.cache_lookup import make_lookup_router
from conductor.cache_orders import CacheOrders
from conductor.cache_rest import make_cache_router
from conductor.cli.access import make_rest_ring
from conductor.cli.background import keep_going
from conductor.cli.configured_cluster import make_cluster, pool_of
from conductor.cli.discovery_sources import start_discovery
from conductor.cli.emulation import EmulatedCluster
from conductor.cli.file_limit import raise_file_limit
from conductor.cli.front import Front
from conductor.cli.front_door_options import engine_context, server_tls
from conductor.cli.kept_state import open_state, restored_feeds
from conductor.cli.learned import save_learned, save_learned_forever, saved_calibrations, saved_lengths
from conductor.cli.logs import configure_logs
from conductor.cli.one_process_front import OneProcessFront
from conductor.cli.picker import start_picker
from conductor.cli.read_again import ReadAgain, keys_of_front_door
from conductor.cli.recording import scheduler_kind, start_recording
from conductor.cli.router_desk import open_router_desk
from conductor.cli.router_services import make_services, tokenizer_folders
from conductor.cli.shared_services import join_shared_state
from conductor.cli.start_up import announce_compilation
from conductor.cli.stop_signals import on_stop_signal
from conductor.cli.tier_services import make_planning, make_runner, start_runner
from conductor.cli.tokenization import PlacementTokens
from conductor.cli.tracing import start_tracing
from conductor.cli.worker_front import WorkerFront
from conductor.config import Config, ServerConfig, load_config
from conductor.configuration_faults import ConfigError
from conductor.configured_admission import make_dispatcher, make_gate
from conductor.console import make_console_routes
from conductor.discovery import EventEndpoints, reported_load
from conductor.discovery.discovered import Discovered
from conductor.discovery.metrics import DiscoveryCollector
from conductor.engine_caches import EngineCaches
from conductor.index_metrics import IndexCollector
from conductor.instance_config import InstanceConfig
from conductor.membership import Membership, endpoints_of
from conductor.metrics import ClusterCollector
from conductor.monitor import ClusterMonitor
from conductor.placement import Objectives
from conductor.placement_metrics import PlacementCollector
from conductor.policies import POLICIES, make_policy
from conductor.prefix_lookup import IndexLookup
from conductor.rehearsal import rehearse, rehearse_reuse
from conductor.rest import Reservations, make_rest_router
from conductor.scheduler import Scheduler
from router import create_app

_log = structlog.get_logger(__name__)

_READY_WITHIN_S = 30.0
_REST_WITHIN_S = 5.0


def serve(
    config_file: Annotated[
        Path | None,
        typer.Option("--config", "-c", help="YAML file listing the engines (docs/configuration.md)."),
    ] = None,
    emulate: Annotated[
        str | None,
        typer.Option(help="Start an emulated cluster: 2p2d (prefill/decode) or 4 (mixed engines)."),
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on (default 127.0.0.1).")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on (default 8000).")] = None,
    workers: Annotated[
        int | None, typer.Option(help="Router processes on that port (default 1: everything in one process).")
    ] = None,
    policy: Annotated[
        str | None, typer.Option(help=f"Placement policy: {', '.join(POLICIES)} (default slo).")
    ] = None,
    record: Annotated[
        Path | None, typer.Option(help="Record every decision here, for conductor replay --decisions.")
    ] = None,
    emulate_speed: Annotated[
        float | None, typer.Option(help="Emulated engines run this many times faster than their hardware.")
    ] = None,
    log_level: Annotated[
        str | None, typer.Option(help="debug, info, warning or error (default info).")
    ] = None,
) -> None:
    """Serve an OpenAI-compatible API that places every request where its KV cache and the load make it fastest.

    Examples:

      conductor serve --emulate 2p2d           two prefill, two decode engines

      conductor serve --config cluster.yaml    real vLLM engines

      conductor serve -c cluster.yaml --workers 4    four router processes

    GET /health answers 200 once requests can be served. Ctrl-C finishes the streams under way and stops
    everything that was started.
    """
    flags = {
        "server": _given(host=host, port=port, workers=workers),
        "scheduling": _given(policy=policy, record=record),
        "emulation": _given(cluster=emulate, speed=emulate_speed),
        "log": _given(level=log_level),
    }
    given = {name: values for name, values in flags.items() if values}
    config = load_config(config_file, given)
    others_bring = config.discovery.brings_instances or config.shared_state.url is not None
    if config.emulation.cluster is None and not config.instances and not others_bring:
        raise ConfigError(
            "nothing to route to: start an emulated cluster with --emulate 2p2d, list engines under 'instances' "
            "in a file given with --config, or say there under 'discovery' where they are found"
        )
    configure_logs(config.log.level, config.log.format)
    raise_file_limit()
    announce_compilation(_log.info)
    rehearse()
    if config.tier_planner.enabled:
        rehearse_reuse()
    uvloop.run(_serve(config, partial(load_config, config_file, given)))


def _given(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


async def _serve(config: Config, read: Callable[[], Config]) -> None:
    """Bring everything up in order, wait for a signal, take it down in reverse."""
    stop = asyncio.Event()
    tls = server_tls(config.server.tls)
    read_again = ReadAgain(config, read)
    on_stop_signal(stop.set, read_again if read_again.has_anything else None)
    clock = time.monotonic
    async with AsyncExitStack() as stack:
        instances = list(config.instances)
        emulated = None
        if config.emulation.cluster is not None:
            emulated = EmulatedCluster(config.emulation)
            instances += emulated.instances()
        cluster = make_cluster(instances, config.shared_pools)
        to_engines = engine_context(config.routing.engine_tls)
        state = open_state(config)
        store = state.store
        shared = await join_shared_state(config, clock, stop)
        stack.push_async_callback(shared.close)
        feeds, snapshots = restored_feeds(config, state, clock, to_engines, shared.take_snapshot())
        index = feeds.index
        id_prefix = f"{secrets.token_hex(4)}-"
        scheduler = scheduler_kind(config.scheduling)(
            cluster,
            index,
            make_policy(
                config.scheduling.policy, config.scheduling.policy_parameters, config.scheduling.seed
            ),
            Objectives(**config.scheduling.objectives.model_dump()),
            config.scheduling.suspension,
            aliases={alias: model.name for model in config.models for alias in model.aliases},
            calibrations=saved_calibrations(store) | shared.joined.calibrations,
            gate=make_gate(config.scheduling.admission, shared.joined.lengths or saved_lengths(store)),
            lookup=IndexLookup(index, feeds.prompts, [pool_of(each) for each in config.shared_pools]),
            id_prefix=id_prefix,
            records=config.scheduling.records,
        )
        if config.state_dir is not None:
            stack.callback(save_learned, scheduler, store)
        journal = start_recording(config.scheduling, scheduler, id_prefix=id_prefix)
        if journal is not None:
            stack.callback(journal.close)
        reservations = Reservations(scheduler, clock, ttl_s=config.scheduling.reservation_ttl_s)
        membership = Membership(scheduler, clock, instances)
        discovered = Discovered.by_registration(membership, clock, time.time, config.discovery)
        engine_caches = EngineCaches(cluster, index, feeds.prompts, membership.configs, scheduler.aliases)

        client = await stack.enter_async_context(httpx.AsyncClient(trust_env=False, verify=to_engines))
        dispatcher = make_dispatcher(config.scheduling.admission, scheduler)
        tokenizers = tokenizer_folders(config, emulated)
        services = make_services(config, scheduler, dispatcher, client, clock, tokenizers, to_engines)
        front: Front
        if config.server.workers > 1:
            front = WorkerFront(config, services, tokenizers)
        else:
            front = OneProcessFront(config, services, tls)
            services.tracing = start_tracing(config.tracing, os.environ, front.registry, stack)
        stack.callback(front.clear)
        registry = front.registry
        registry.register(BuildCollector())
        registry.register(AdmissionCollector(scheduler.gate, dispatcher))
        registry.register(ClusterCollector(scheduler, clock))
        registry.register(PlacementCollector(scheduler, clock, reservations, journal))
        embedded = [] if emulated is None else emulated.instances()
        actions = make_runner(config, cluster, feeds, client, clock, stack, embedded)
        planning = make_planning(config, scheduler, actions, feeds, clock, id_prefix, embedded, state.reuse)
        registry.register(ActionCollector(actions, planning))
        orders = CacheOrders(
            actions, cluster, index, feeds.prompts, clock, aliases=scheduler.aliases, id_prefix=id_prefix
        )
        shared.lead(actions, planning, orders)
        rest = make_rest_router(
            scheduler,
            clock,
            reservations=reservations,
            membership=membership,
            members=shared.members(membership),
            tokenize=PlacementTokens(services.tokens),
            orders=orders,
            streams=feeds,
            discovered=discovered,
        )
        registry.register(DiscoveryCollector(discovered.roll))
        registry.register(IndexCollector(index, feeds, snapshots))
        shared.measure(registry)
        rest_ring = make_rest_ring(config, os.environ)
        app = create_app(
            services,
            keys=rest_ring,
            not_ready_reason=lambda: scheduler.why_not_ready(clock()),
            routers=[
                rest,
                make_cache_router(index, feeds),
                make_lookup_router(index, feeds.prompts, engine_caches),
                *shared.routers(feeds),
            ],
            details=shared.health,
            exposition=front.exposition,
            version=__version__,
        )
        if config.server.console:
            app.include_router(make_console_routes())
        for router, prefix in feeds.routers():
            app.include_router(router, prefix=prefix)
        await front.start(app)
        if emulated is not None:
            stack.push_async_callback(emulated.stop)
            await emulated.start()
        if snapshots is not None:
            snapshots.start()
            stack.callback(snapshots.close)
        for pool in config.shared_pools:
            if pool.mooncake is not None:
                feeds.follow_master(Holder(pool.id), pool.mooncake)
        feeds.start()
        stack.callback(feeds.close)
        for keeper in (feeds.expire_forever, reservations.expire_forever, membership.check_forever):
            keep_going(stack, keeper)
        if config.state_dir is not None:
            keep_going(stack, partial(save_learned_forever, scheduler, store))
        told_of_loss = [front.instance_lost]
        desk = await open_router_desk(config, services, tokenizers, scheduler, front.url, stack)
        if desk is not None:
            told_of_loss.append(desk.instance_lost)
        read_again.serve(front.reload_certificate, keys_of_front_door(services, rest_ring, front, desk))
        loads = SglangLoadFeeds(_deliver_on_loop(scheduler, clock))
        loads.start()
        stack.callback(loads.close)
        monitor = ClusterMonitor(
            scheduler,
            feeds.engines,
            clock,
            interval_s=config.health.interval_s,
            timeout_s=config.health.timeout_s,
            unhealthy_after=config.health.unhealthy_after,
            tls=to_engines,
            endpoint_overrides=_endpoint_overrides(membership.configs()),
            on_up=engine_caches.up,
            on_down=partial(_lost, told_of_loss, actions),
            on_left=partial(_left, engine_caches, actions),
            follow_load=loads.follow,
            unfollow_load=loads.unfollow,
        )
        await start_runner(actions, feeds, stack)
        if planning is not None:
            stack.callback(planning.save)
            keep_going(stack, planning.plan_forever)
        monitor.start()
        membership.watcher = monitor
        shared.start(scheduler, membership, front.url, instances, feeds)
        stack.push_async_callback(monitor.close)
        await start_discovery(config.discovery, discovered, clock, stack)
        stack.push_async_callback(front.stop)
        await start_picker(config, services, scheduler, clock, stack)
        console = Console(stderr=True)
        await _wait_until_ready(console, scheduler, front, stop, clock)
        gc.collect()
        gc.freeze()  # what start-up left is here to stay; looking through it again and again takes milliseconds
        if not stop.is_set():
            _announce(console, scheduler, front.url, config.server)
        await stop.wait()
        console.print("stopping; streams under way may finish")


def _deliver_on_loop(scheduler: Scheduler, clock: Callable[[], float]) -> Callable[[Holder, LoadStat], None]:
    """Pushed loads arrive on a thread of their own; the scheduler belongs to the event loop."""
    loop = asyncio.get_running_loop()

    def report(holder: Holder, stat: LoadStat) -> None:
        if scheduler.cluster.rank(holder) is not None:
            scheduler.report_load(holder.instance_id, holder.rank, reported_load(stat, clock()))

    def deliver(holder: Holder, stat: LoadStat) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has stopped
            loop.call_soon_threadsafe(report, holder, stat)

    return deliver


def _lost(
    told: Sequence[Callable[[str, str], None]], actions: ActionRunner, instance_id: str, reason: str
) -> None:
    for tell in told:
        tell(instance_id, reason)
    actions.holder_left(instance_id)


def _left(caches: EngineCaches, actions: ActionRunner, holder: Holder) -> None:
    caches.left(holder)
    actions.holder_left(holder.instance_id)


def _endpoint_overrides(instances: list[InstanceConfig]) -> dict[str, dict[int, EventEndpoints]]:
    return {
        instance.id: endpoints for instance in instances if (endpoints := endpoints_of(instance)) is not None
    }


async def _wait_until_ready(
    console: Console,
    scheduler: Scheduler,
    front: Front,
    stop: asyncio.Event,
    clock: Callable[[], float],
) -> None:
    """Wait until requests can be served, and a little longer for every engine to be up."""
    started_s = clock()
    with console.status("waiting for the engines"):
        while not stop.is_set():
            now_s = clock()
            missing = scheduler.why_not_ready(now_s) or front.why_not_ready()
            all_up = all(instance.is_candidate(now_s) for instance in scheduler.cluster)
            if missing is None and (all_up or now_s > started_s + _REST_WITHIN_S):
                return
            if missing is not None and now_s > started_s + _READY_WITHIN_S:
                console.print(f"[yellow]not ready yet:[/yellow] {missing}")
                started_s = now_s
            await asyncio.sleep(0.05)


def _announce(console: Console, scheduler: Scheduler, url: str, server: ServerConfig) -> None:
    table = Table(title="Conductor is ready")
    for heading in ("instance", "role", "url", "health", "KV blocks", "events"):
        table.add_column(heading, no_wrap=True)
    for instance in scheduler.cluster:
        facts = instance.facts
        blocks = facts.kv_capacity_blocks if facts else None
        table.add_row(
            instance.instance_id,
            str(instance.role),
            instance.url,
            str(instance.health),
            f"{blocks} x {instance.block_size}" if blocks else "?",
            "yes" if facts and facts.publishes_events else "no",
        )
    console.print(table)
    workers = server.workers
    message = {"role": "user", "content": "Hello!"}
    body = json.dumps({"model": scheduler.models()[0].model, "messages": [message]})
    for line in (
        f"front door    {url}/v1" + (f"  ({workers} router processes)" if workers > 1 else ""),
        *([f"console       {url}/ui"] if server.console else ()),
        f"why           {url}/v1/placements",
        f"API, metrics  {url}/docs  {url}/metrics",
        f"try           curl -i {url}/v1/chat/completions -H 'content-type: application/json' -d '{body}'",
        "Ctrl-C stops everything.",
    ):
        console.print(line, soft_wrap=True, highlight=False, markup=False)
