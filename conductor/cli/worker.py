"""One router process of `conductor serve --workers`: `python -m conductor.cli.worker`, started by the conductor.

It must start fast and stay small: nothing here loads the index's compiled kernels.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import signal
import socket
import ssl
import sys
from contextlib import AsyncExitStack
from pathlib import Path

import httpx
import structlog
import uvloop

from conductor.cli.file_limit import raise_file_limit
from conductor.cli.front_door_options import cors_policy, engine_context, reload_certificate, server_tls
from conductor.cli.logs import configure_logs
from conductor.cli.start_up import without_collections
from conductor.cli.stop_signals import on_stop_signal
from conductor.cli.tracing import start_tracing
from conductor.front_door_config import FrontDoorConfig
from router.api_keys import KeyRing
from router.metrics import RouterMetrics
from router.server import FrontDoorServer
from router.services import RouterServices
from router.tokenizer_folders import load_tokenizers
from router.tokens import EngineTokenizer, TokenService
from router.workers.client import PlacementClient, connect
from router.workers.conductors import Conductors
from router.workers.messages import Setup
from router.workers.metric_sums import families_of
from router.workers.passing_on import PassedOn

_log = structlog.get_logger(__name__)


def main() -> int:
    parser = argparse.ArgumentParser(prog="conductor.cli.worker", description=__doc__)
    add = parser.add_argument
    add("--number", type=int, required=True, help="which worker this is")
    add("--socket", required=True, help="Unix socket of the conductor")
    add("--listen-fd", type=int, required=True, help="listening socket that was inherited")
    add("--log-level", required=True)
    add("--log-format", required=True)
    options = parser.parse_args()
    configure_logs(options.log_level, options.log_format, worker=options.number)
    raise_file_limit()
    return uvloop.run(_work(options.number, options.socket, socket.socket(fileno=options.listen_fd)))


async def _work(number: int, conductor: str, listening: socket.socket) -> int:
    """Serve until a signal, or until the conductor is gone; the exit code."""
    stop = asyncio.Event()
    parent = os.getppid()
    on_stop_signal(stop.set)
    try:
        client = await connect(conductor, number, os.getpid())
        setup = await client.welcomed
    except OSError as error:
        _log.error("the conductor cannot be reached", error=str(error))
        return 1
    config = FrontDoorConfig.model_validate_json(setup.front_door)
    tls, to_engines = server_tls(config.tls), engine_context(config.engine_tls)
    async with AsyncExitStack() as stack:
        engines = await stack.enter_async_context(httpx.AsyncClient(trust_env=False, verify=to_engines))
        with without_collections():
            services = make_router_services(setup, config, client, engines, to_engines)
        services.tracing = start_tracing(config.tracing, os.environ, services.metrics.registry, stack)
        client.serve(services, lambda: families_of(services.metrics.registry))
        server = FrontDoorServer(
            PassedOn(setup.rest_socket),
            services,
            listening=listening,
            tls=None if tls is None else tls.context,
        )
        if tls is not None:
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reload_certificate, tls)
        await server.start()
        client.ready()
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait((stopping, client.lost), return_when=asyncio.FIRST_COMPLETED)
        if client.lost.done():
            _log.error("the conductor is gone")
            services.close()
        await server.stop()
        await client.close()
        if os.getppid() != parent:  # which could not do that itself
            shutil.rmtree(Path(conductor).parent, ignore_errors=True)
        stopping.cancel()
    return 0 if stop.is_set() else 1


def make_router_services(
    setup: Setup,
    config: FrontDoorConfig,
    client: PlacementClient | Conductors,
    engines: httpx.AsyncClient,
    to_engines: ssl.SSLContext,
) -> RouterServices:
    """Those of a process whose placements are made elsewhere."""
    metrics = RouterMetrics()
    tokens = TokenService(
        load_tokenizers(setup.tokenizers, cache_bytes=setup.token_cache_bytes),
        engine=EngineTokenizer(engines, client.any_url),
        metrics=metrics,
    )
    return RouterServices(
        client,
        dispatch=client,
        settings=setup.settings,
        tokens=tokens,
        metrics=metrics,
        keys=None if setup.keys is None else KeyRing(setup.keys, client.make_account),
        cors=cors_policy(config.cors),
        engine_tls=to_engines,
    )


if __name__ == "__main__":
    sys.exit(main())
