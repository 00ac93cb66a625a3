"""`conductor index`: the cache index alone, behind Mooncake's indexer API."""

from __future__ import annotations

import asyncio
import signal
import time
from contextlib import AsyncExitStack
from typing import Annotated

import typer
import uvicorn
import uvloop
from fastapi import FastAPI, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from rich.console import Console

from cache_index import CacheIndex
from conductor import __version__
from conductor.cache_rest import make_cache_router
from conductor.cli.event_feeds import EventFeeds
from conductor.cli.file_limit import raise_file_limit
from conductor.cli.logs import configure_logs
from conductor.config import Config, ConfigError, load_config
from conductor.indexer import IndexerService, make_indexer_router
from conductor.metrics import IndexCollector
from router.server import PlainServer, listen


def index(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 8090,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
) -> None:
    """Serve the cache index alone, for routers of your own.

    Wire-compatible with Mooncake's indexer API (RFC #1403): POST /register, /unregister, /query,
    /query_by_hash. Events come from vLLM, SGLang, TensorRT-LLM and Mooncake's master as registered, from
    LMCache servers whose coordinator is http://HOST:PORT/lmcache, and by POST /v1/events. Also
    /v1/cache/lookup, /v1/cache/tree, /v1/cache/streams, /metrics, /health and /docs.
    """
    config = load_config(flags={"server": {"host": host, "port": port}, "log": {"level": log_level}})
    configure_logs(config.log)
    raise_file_limit()
    uvloop.run(_serve(config))


async def _serve(config: Config) -> None:
    stop = asyncio.Event()
    for signum in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(signum, stop.set)
    async with AsyncExitStack() as stack:
        cache_index = CacheIndex()
        feeds = EventFeeds(cache_index, time.monotonic)
        feeds.start()
        stack.callback(feeds.close)
        expiry = asyncio.create_task(feeds.expire_forever())
        stack.callback(expiry.cancel)
        app = _make_app(cache_index, feeds)
        address = f"{config.server.host}:{config.server.port}"
        try:
            listening = listen(config.server.host, config.server.port)
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {address} ({error.strerror}); choose another port with --port"
            ) from None
        server = PlainServer(
            uvicorn.Config(app, log_config=None, access_log=False, ws="none", lifespan="off")
        )
        serving = asyncio.create_task(server.serve(sockets=[listening]))
        console = Console(stderr=True)
        console.print(f"index  http://{address}  (POST /register, /query; API at /docs)", highlight=False)
        await stop.wait()
        server.should_exit = True
        await serving


def _make_app(cache_index: CacheIndex, feeds: EventFeeds) -> FastAPI:
    app = FastAPI(title="Conductor index", version=__version__)
    app.include_router(make_indexer_router(IndexerService(cache_index, feeds.by_kind)))
    app.include_router(make_cache_router(cache_index, feeds))
    for router, prefix in feeds.routers():
        app.include_router(router, prefix=prefix)
    registry = CollectorRegistry()
    registry.register(IndexCollector(cache_index, feeds))

    @app.get("/health", tags=["operations"])
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/metrics", tags=["operations"], response_class=Response)
    async def metrics() -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    return app
