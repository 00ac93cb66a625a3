"""`conductor index`: the cache index alone, behind Mooncake's indexer API."""

from __future__ import annotations

import asyncio
import gc
import os
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import structlog
import typer
import uvicorn
import uvloop
from fastapi import FastAPI, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from rich.console import Console

from conductor import __version__
from conductor.build_info import BuildCollector
from conductor.cache_rest import make_cache_router
from conductor.cli.access import make_rest_ring
from conductor.cli.background import keep_going
from conductor.cli.event_feeds import EventFeeds
from conductor.cli.file_limit import raise_file_limit
from conductor.cli.front import cannot_listen
from conductor.cli.front_door_options import engine_context, reload_certificate, server_tls
from conductor.cli.kept_state import open_state, restored_feeds
from conductor.cli.logs import configure_logs
from conductor.cli.read_again import ReadAgain, keys_of_index
from conductor.cli.start_up import announce_compilation, without_collections
from conductor.cli.stop_signals import on_stop_signal
from conductor.config import Config, load_config
from conductor.index_metrics import IndexCollector, RegistrationCollector
from conductor.index_registrations import RegistrationBook
from conductor.index_snapshots import IndexSnapshots
from conductor.indexer import IndexerService, make_indexer_router
from router.body_limit import BodyLimit
from router.key_check import KeyCheck
from router.server import PlainServer, listen

DEFAULT_PORT = 8090


def index(
    config_file: Annotated[
        Path | None, typer.Option("--config", "-c", help="YAML file (docs/configuration.md).")
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on (default 127.0.0.1).")] = None,
    port: Annotated[int | None, typer.Option(help=f"Port to listen on (default {DEFAULT_PORT}).")] = None,
    state_dir: Annotated[
        Path | None, typer.Option(help="Folder for what survives a restart: registrations and the index.")
    ] = None,
    log_level: Annotated[
        str | None, typer.Option(help="debug, info, warning or error (default info).")
    ] = None,
) -> None:
    """Serve the cache index alone, for routers of your own.

    Wire-compatible with Mooncake's indexer API (RFC #1403): POST /register, /unregister, /query,
    /query_by_hash. Events come from vLLM, SGLang, TensorRT-LLM and Mooncake's master as registered, from
    LMCache servers whose coordinator is http://HOST:PORT/lmcache, and by POST /v1/events. Also
    /v1/cache/lookup, /v1/cache/tree, /v1/cache/streams, /metrics, /health and /docs.
    """
    flags: dict[str, Any] = {
        "server": {name: value for name, value in (("host", host), ("port", port)) if value is not None},
        "log": {} if log_level is None else {"level": log_level},
        "state_dir": state_dir,
    }
    given = {name: value for name, value in flags.items() if value}
    config = load_config(config_file, given)
    configure_logs(config.log.level, config.log.format)
    raise_file_limit()
    announce_compilation(structlog.get_logger(__name__).info)
    uvloop.run(_serve(config, partial(load_config, config_file, given)))


async def _serve(config: Config, read: Callable[[], Config]) -> None:
    stop = asyncio.Event()
    tls = server_tls(config.server.tls)
    read_again = ReadAgain(config, read)
    on_stop_signal(stop.set, read_again if read_again.has_anything else None)
    async with AsyncExitStack() as stack:
        to_engines = engine_context(config.routing.engine_tls)
        keys = make_rest_ring(config, os.environ)
        state = open_state(config)
        with without_collections():
            feeds, snapshots = restored_feeds(config, state, time.monotonic, to_engines)
            if snapshots is not None:
                stack.callback(snapshots.close)
            book = RegistrationBook(state.store)
            service = IndexerService(feeds.index, feeds.by_kind, feeds.prompts, keep=book.save)
            app = _make_app(service, feeds, book, snapshots)
            app.add_middleware(BodyLimit, max_body_bytes=config.server.max_body_bytes)
            if keys is not None:
                app.add_middleware(KeyCheck, keys=keys)
        read_again.serve(lambda: None if tls is None else reload_certificate(tls), keys_of_index(keys))
        book.restore(service.register)
        feeds.start()
        stack.callback(feeds.close)
        if snapshots is not None:
            snapshots.start()
        keep_going(stack, feeds.expire_forever)
        port = config.server.port if "port" in config.server.model_fields_set else DEFAULT_PORT
        address = f"{config.server.host}:{port}"
        try:
            listening = listen(config.server.host, port)
        except OSError as error:
            raise cannot_listen(config.server.host, port, error) from None
        server = PlainServer(
            uvicorn.Config(app, log_config=None, access_log=False, ws="none", lifespan="off"),
            None if tls is None else tls.context,
        )
        gc.freeze()  # what start-up left is here to stay; looking through it again and again takes milliseconds
        serving = asyncio.create_task(server.serve(sockets=[listening]))
        console = Console(stderr=True)
        console.print(
            f"index  {'http' if tls is None else 'https'}://{address}  (POST /register, /query; API at /docs)",
            highlight=False,
        )
        await stop.wait()
        server.stop_soon()
        await serving


def _make_app(
    service: IndexerService, feeds: EventFeeds, book: RegistrationBook, snapshots: IndexSnapshots | None
) -> FastAPI:
    app = FastAPI(title="Conductor index", version=__version__)
    app.include_router(make_indexer_router(service))
    app.include_router(make_cache_router(feeds.index, feeds))
    for router, prefix in feeds.routers():
        app.include_router(router, prefix=prefix)
    registry = CollectorRegistry()
    registry.register(BuildCollector())
    registry.register(IndexCollector(feeds.index, feeds, snapshots))
    registry.register(RegistrationCollector(lambda: book.failures))

    @app.get("/health", tags=["operations"])
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/metrics", tags=["operations"], response_class=Response)
    async def metrics() -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    return app
