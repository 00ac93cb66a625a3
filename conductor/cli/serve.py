"""`conductor serve`: index, conductor and router in one process, over real engines or an emulated cluster."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import signal
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Annotated, Any

import httpx
import structlog
import typer
import uvloop
from rich.console import Console
from rich.table import Table

from cache_index import CacheIndex, Holder, LoadStat, SglangLoadFeeds
from conductor.cache_rest import make_cache_router
from conductor.cli.emulation import EmulatedCluster
from conductor.cli.event_feeds import EventFeeds
from conductor.cli.file_limit import raise_file_limit
from conductor.cli.logs import configure_logs
from conductor.cluster import Cluster, make_instance
from conductor.config import Config, ConfigError, InstanceConfig, load_config
from conductor.costs import CATALOGUE, PrefillCalibration, dump_calibrations, load_calibrations
from conductor.discovery import EventEndpoints, reported_load
from conductor.metrics import ClusterCollector, IndexCollector
from conductor.monitor import ClusterMonitor
from conductor.policies import make_policy
from conductor.rest import make_rest_router
from conductor.scheduler import Objectives, Scheduler, SuspensionPolicy
from conductor.state_store import FileStateStore, MemoryStateStore, StateStore
from router import (
    EngineTokenizer,
    FrontDoorServer,
    PromptTokenizer,
    RouterMetrics,
    RouterServices,
    RouterSettings,
    TokenService,
    create_app,
)
from simulator.emulator.tokens import TOKENIZER_FOLDER

_log = structlog.get_logger(__name__)

_READY_WITHIN_S = 30.0
_REST_WITHIN_S = 5.0
_CALIBRATION_KEY = "prefill-calibration"


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
    policy: Annotated[str | None, typer.Option(help="Placement policy (default slo).")] = None,
    emulate_speed: Annotated[
        float | None, typer.Option(help="Emulated engines run this many times faster than their hardware.")
    ] = None,
    log_level: Annotated[
        str | None, typer.Option(help="debug, info, warning or error (default info).")
    ] = None,
) -> None:
    """Serve an OpenAI-compatible API that places every request where its KV cache and the load make it fastest.

    Examples:

      conductor serve --emulate 2p2d            two prefill and two decode engines, emulated

      conductor serve --config cluster.yaml     real vLLM engines

    GET /health answers 200 once requests can be served. Ctrl-C finishes the streams under way and stops
    everything that was started.
    """
    flags = {
        "server": _given(host=host, port=port),
        "scheduling": _given(policy=policy),
        "emulation": _given(cluster=emulate, speed=emulate_speed),
        "log": _given(level=log_level),
    }
    config = load_config(config_file, {name: values for name, values in flags.items() if values})
    if config.emulation.cluster is None and not config.instances:
        raise ConfigError(
            "nothing to route to: start an emulated cluster with --emulate 2p2d, "
            "or list engines under 'instances' in a file given with --config"
        )
    configure_logs(config.log)
    raise_file_limit()
    uvloop.run(_serve(config))


def _given(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


async def _serve(config: Config) -> None:
    """Bring everything up in order, wait for a signal, take it down in reverse."""
    stop = asyncio.Event()
    for signum in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(signum, stop.set)
    clock = time.monotonic
    async with AsyncExitStack() as stack:
        instances = list(config.instances)
        emulated = None
        if config.emulation.cluster is not None:
            emulated = EmulatedCluster(config.emulation)
            instances += emulated.instances()
        cluster = _make_cluster(instances)
        store: StateStore = FileStateStore(config.state_dir) if config.state_dir else MemoryStateStore()
        index = CacheIndex()
        feeds = EventFeeds(index, clock)
        scheduler = Scheduler(
            cluster,
            index,
            make_policy(config.scheduling.policy),
            Objectives(config.scheduling.objectives.ttft_s, config.scheduling.objectives.tbt_s),
            SuspensionPolicy(config.scheduling.suspend_after_failures, config.scheduling.suspend_s),
            aliases={alias: model.name for model in config.models for alias in model.aliases},
            calibrations=_saved_calibrations(store),
            id_prefix=f"{secrets.token_hex(4)}-",
            records=config.scheduling.records,
        )
        stack.callback(lambda: store.put(_CALIBRATION_KEY, dump_calibrations(scheduler.calibrations)))

        client = await stack.enter_async_context(httpx.AsyncClient(trust_env=False))
        services = _make_services(config, scheduler, client, clock, emulated)
        services.metrics.registry.register(ClusterCollector(scheduler, clock))
        services.metrics.registry.register(IndexCollector(index, feeds))
        app = create_app(
            services,
            not_ready_reason=lambda: scheduler.why_not_ready(clock()),
            routers=[make_rest_router(scheduler, index, clock), make_cache_router(index, feeds)],
        )
        for router, prefix in feeds.routers():
            app.include_router(router, prefix=prefix)
        server = FrontDoorServer(app, services, host=config.server.host, port=config.server.port)
        try:
            await server.start()
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {config.server.host}:{config.server.port} ({error.strerror}); "
                "choose another port with --port"
            ) from None
        if emulated is not None:
            stack.push_async_callback(emulated.stop)
            await emulated.start()
        feeds.start()
        stack.callback(feeds.close)
        expiry = asyncio.create_task(feeds.expire_forever())
        stack.callback(expiry.cancel)
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
            endpoint_overrides=_endpoint_overrides(instances),
            on_down=services.instance_lost,
            follow_load=loads.follow,
        )
        monitor.start()
        stack.push_async_callback(monitor.close)
        stack.push_async_callback(server.stop)
        console = Console(stderr=True)
        await _wait_until_ready(console, scheduler, stop, clock)
        if not stop.is_set():
            _announce(console, scheduler, server.url)
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


def _make_cluster(instances: list[InstanceConfig]) -> Cluster:
    cluster = Cluster()
    for instance in instances:
        cluster.add(
            make_instance(
                instance_id=instance.id,
                url=instance.url,
                role=instance.role,
                instance_class=CATALOGUE[instance.instance_class],
                protocol=instance.protocol,
                ranks=instance.ranks,
                block_size=instance.block_size,
                api_key=instance.api_key,
            )
        )
    return cluster


def _saved_calibrations(store: StateStore) -> dict[str, PrefillCalibration]:
    saved = store.get(_CALIBRATION_KEY)
    try:
        return load_calibrations(saved) if saved is not None else {}
    except ValueError as error:
        _log.warning("the saved calibration is ignored", reason=str(error))
        return {}


def _make_services(
    config: Config,
    scheduler: Scheduler,
    client: httpx.AsyncClient,
    clock: Callable[[], float],
    emulated: EmulatedCluster | None,
) -> RouterServices:
    folders = {model.name: model.tokenizer for model in config.models if model.tokenizer is not None}
    if emulated is not None:
        folders.setdefault(config.emulation.model, TOKENIZER_FOLDER)
    tokenizers = {}
    for name, folder in folders.items():
        try:
            tokenizers[name] = PromptTokenizer.from_folder(folder)
        except (OSError, ValueError) as error:
            raise ConfigError(f"models: the tokenizer of {name!r} cannot be loaded: {error}") from None
    for model in config.models:
        for alias in model.aliases:
            if model.name in tokenizers:
                tokenizers[alias] = tokenizers[model.name]

    def engine_for(model: str) -> str | None:
        """Any instance that can tokenize for this model."""
        name = scheduler.aliases.get(model, model)
        now_s = clock()
        return next((i.url for i in scheduler.cluster if i.serves(name) and i.is_candidate(now_s)), None)

    metrics = RouterMetrics()
    return RouterServices(
        scheduler,
        settings=RouterSettings(
            max_body_bytes=config.server.max_body_bytes,
            max_attempts=config.routing.max_attempts,
            connect_timeout_s=config.routing.connect_timeout_s,
            prefill_timeout_s=config.routing.prefill_timeout_s,
            first_byte_timeout_s=config.routing.first_byte_timeout_s,
            shutdown_timeout_s=int(config.server.shutdown_grace_s),
            log_requests=config.log.level in ("debug", "info"),
        ),
        tokens=TokenService(tokenizers, engine=EngineTokenizer(client, engine_for), metrics=metrics),
        metrics=metrics,
        clock=clock,
    )


def _endpoint_overrides(instances: list[InstanceConfig]) -> dict[str, dict[int, EventEndpoints]]:
    return {
        instance.id: {
            rank: EventEndpoints(stream.endpoint, stream.replay_endpoint, stream.topic)
            for rank, stream in enumerate(instance.kv_events)
        }
        for instance in instances
        if instance.kv_events is not None
    }


async def _wait_until_ready(
    console: Console, scheduler: Scheduler, stop: asyncio.Event, clock: Callable[[], float]
) -> None:
    """Wait until requests can be served, and a little longer for every engine to be up."""
    started_s = clock()
    with console.status("waiting for the engines"):
        while not stop.is_set():
            now_s = clock()
            missing = scheduler.why_not_ready(now_s)
            all_up = all(instance.is_candidate(now_s) for instance in scheduler.cluster)
            if missing is None and (all_up or now_s > started_s + _REST_WITHIN_S):
                return
            if missing is not None and now_s > started_s + _READY_WITHIN_S:
                console.print(f"[yellow]not ready yet:[/yellow] {missing}")
                started_s = now_s
            await asyncio.sleep(0.05)


def _announce(console: Console, scheduler: Scheduler, url: str) -> None:
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
    message = {"role": "user", "content": "Hello!"}
    body = json.dumps({"model": scheduler.models()[0].model, "messages": [message]})
    for line in (
        f"front door    {url}/v1",
        f"why           {url}/v1/placements",
        f"API, metrics  {url}/docs  {url}/metrics",
        f"try           curl -i {url}/v1/chat/completions -H 'content-type: application/json' -d '{body}'",
        "Ctrl-C stops everything.",
    ):
        console.print(line, soft_wrap=True, highlight=False, markup=False)
