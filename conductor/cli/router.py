"""`conductor router`: a front door without a scheduler of its own, over one or several conductors."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import time
from contextlib import AsyncExitStack
from pathlib import Path
from random import Random
from typing import Annotated

import httpx
import structlog
import typer
import uvloop
from rich.console import Console

from conductor.build_info import BuildCollector
from conductor.cli.file_limit import raise_file_limit
from conductor.cli.front import cannot_listen
from conductor.cli.front_door_options import engine_context, reload_certificate, server_tls
from conductor.cli.logs import configure_logs
from conductor.cli.start_up import without_collections
from conductor.cli.stop_signals import on_stop_signal, unless_stopped
from conductor.cli.tracing import start_tracing
from conductor.cli.worker import make_router_services
from conductor.config import Config, load_config
from conductor.configuration_faults import ConfigError
from conductor.front_door_config import FrontDoorConfig
from router.server import FrontDoorServer
from router.workers.conductors import Conductor, Conductors
from router.workers.router_front import RouterFront

_log = structlog.get_logger(__name__)


def router(
    conductor: Annotated[
        list[str],
        typer.Option(
            help="HOST:PORT of a conductor's server.routers_port; several, in the order to ask them."
        ),
    ],
    config_file: Annotated[
        Path | None, typer.Option("--config", "-c", help="YAML file, of which server and log are used.")
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on (default 127.0.0.1).")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on (default 8000).")] = None,
    log_level: Annotated[
        str | None, typer.Option(help="debug, info, warning or error (default info).")
    ] = None,
) -> None:
    """Serve the OpenAI-compatible API with the placements of conductors elsewhere.

    The conductors need server.routers_port, and the same server.admin_token as here (in the environment:
    CONDUCTOR_SERVER__ADMIN_TOKEN). When the one that is asked is gone, the next one is; when none answers, requests
    go to the emptier of two instances drawn by lot. Settings, keys and tokenizers are the conductors'.

    Example:

      conductor router --conductor 10.0.0.5:8001 --conductor 10.0.0.6:8001 --port 8000
    """
    flags = {
        "server": {name: value for name, value in (("host", host), ("port", port)) if value is not None},
        "log": {} if log_level is None else {"level": log_level},
    }
    config = load_config(config_file, {name: values for name, values in flags.items() if values})
    addresses = [_address(each) for each in conductor]
    if config.server.admin_token is None:
        raise ConfigError(
            "server.admin_token is what conductors ask a router for; give it as CONDUCTOR_SERVER__ADMIN_TOKEN"
        )
    configure_logs(config.log.level, config.log.format)
    raise_file_limit()
    uvloop.run(_serve(config, addresses))


def _address(text: str) -> Conductor:
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65_536:
        raise ConfigError(f"--conductor {text!r} must look like HOST:PORT, with its server.routers_port")
    return Conductor(host.strip("[]"), int(port))


async def _serve(config: Config, addresses: list[Conductor]) -> None:
    assert config.server.admin_token is not None
    stop = asyncio.Event()
    on_stop_signal(stop.set)
    clock = time.monotonic
    conductors = Conductors(addresses, config.server.admin_token.get_secret_value(), clock, Random())
    conductors.start()
    async with AsyncExitStack() as stack:
        stack.push_async_callback(conductors.close)
        setup = await unless_stopped(stop, conductors.welcomed())
        if setup is None:
            return
        door = FrontDoorConfig.model_validate_json(setup.front_door)
        tls, to_engines = server_tls(door.tls), engine_context(door.engine_tls)
        engines = await stack.enter_async_context(httpx.AsyncClient(trust_env=False, verify=to_engines))
        with without_collections():
            services = make_router_services(setup, door, conductors, engines, to_engines)
        services.tracing = start_tracing(door.tracing, os.environ, services.metrics.registry, stack)
        services.metrics.registry.register(BuildCollector())
        conductors.serve(services)
        server = FrontDoorServer(
            RouterFront(conductors, services.metrics.registry),
            services,
            host=config.server.host,
            port=config.server.port,
            tls=None if tls is None else tls.context,
        )
        if tls is not None:
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reload_certificate, tls)
        try:
            await server.start()
        except OSError as error:
            raise cannot_listen(config.server.host, config.server.port, error) from None
        gc.collect()
        gc.freeze()
        Console(stderr=True).print(f"router  {server.url}/v1", highlight=False)
        await stop.wait()
        await server.stop()
