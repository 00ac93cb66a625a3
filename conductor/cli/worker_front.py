"""The front door as several processes on one port; this process keeps what they share."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import uvicorn
from fastapi import FastAPI
from prometheus_client import CollectorRegistry, generate_latest

from conductor.cli.front import cannot_listen
from conductor.cli.worker_processes import WorkerProcesses
from conductor.config import Config
from conductor.configuration_faults import ConfigError
from conductor.front_door_config import FrontDoorConfig
from router import ApiKey
from router.server import BACKLOG, PlainServer, address_url, listen, private_socket
from router.services import RouterServices
from router.workers.desk import PlacementDesk
from router.workers.messages import Setup
from router.workers.metric_sums import SummedMetrics

_COLLECT_EVERY_S = 1.0
_COLLECT_WITHIN_S = 1.0
_LONGEST_FOLDER = 70  # Linux allows 107 characters for the path of a Unix socket


class WorkerFront:
    """A `Front` of several processes.

    Workers accept requests and ask the desk for placements; the REST API is served to them, and through them.

    Each worker has a listening socket of its own on the one port (SO_REUSEPORT), between which the kernel divides
    connections. All of them are opened, and kept open, here: a connection that a dead worker had not accepted
    waits for the worker's next process.
    """

    def __init__(self, config: Config, services: RouterServices, tokenizers: Mapping[str, str]) -> None:
        """Raises ConfigError where no Unix socket can be put into the folder for temporary files."""
        if len(os.fsencode(tempfile.gettempdir())) > _LONGEST_FOLDER:
            raise ConfigError(
                f"server.workers: the path of {tempfile.gettempdir()!r} is too long for Unix sockets in it; "
                f"set TMPDIR to a folder of at most {_LONGEST_FOLDER} characters"
            )
        self.registry = CollectorRegistry()  # of what is shown for all processes together
        self._config = config
        self._folder = Path(tempfile.mkdtemp(prefix="conductor-"))
        self._rest_path = self._folder / "rest"
        setup = Setup(
            services.settings,
            dict(tokenizers),
            config.routing.token_cache_bytes,
            None if services.keys is None else list(services.keys.keys),
            str(self._rest_path),
            FrontDoorConfig(
                cors=config.server.cors,
                tls=config.server.tls,
                engine_tls=config.routing.engine_tls,
                tracing=config.tracing,
            ).model_dump_json(),
        )
        self._desk = PlacementDesk(services, setup)
        self._sums = SummedMetrics(
            services.metrics.registry,
            lambda: {} if self._processes is None else self._processes.starts,
            lambda: self._desk.ready_workers(),
            lambda: {} if self._processes is None else self._processes.killed,
        )
        self._desk.on_samples = self._sums.report
        self._desk.on_gone = self._sums.gone
        self._desk.on_silent = self._kill
        self._listening: list[socket.socket] = []
        self._processes: WorkerProcesses | None = None
        self._rest: PlainServer | None = None
        self._rest_task: asyncio.Task[None] | None = None
        self._collecting: asyncio.Task[None] | None = None
        self._port = config.server.port
        self.registry.register(self._sums)

    @property
    def url(self) -> str:
        server = self._config.server
        return address_url(server.host, self._port, tls=server.tls is not None)

    async def exposition(self) -> bytes:
        """The metrics of all processes, as they are now."""
        await self._desk.collect(_COLLECT_WITHIN_S)
        return generate_latest(self.registry)

    def instance_lost(self, instance_id: str, reason: str) -> None:
        self._desk.instance_lost(instance_id, reason)

    def reload_certificate(self) -> None:
        """Every worker reads the certificate again."""
        if self._processes is not None:
            self._processes.signal(signal.SIGHUP)

    def use_keys(self, keys: list[ApiKey]) -> None:
        self._desk.use_keys(keys)

    async def start(self, app: FastAPI) -> None:
        """Listen, and start the workers. Raises ConfigError naming what cannot be had."""
        server = self._config.server
        try:
            self._listening = _listen_together(server.host, server.port, server.workers)
        except OSError as error:
            raise cannot_listen(server.host, server.port, error) from None
        self._port = self._listening[0].getsockname()[1]
        try:
            await self._desk.start(self._folder / "placements")
            await self._serve_rest(app)
        except OSError as error:
            raise ConfigError(
                f"server.workers: cannot open a Unix socket in {self._folder} ({error.strerror or error}); "
                "set TMPDIR to a folder that takes them"
            ) from None
        self._processes = WorkerProcesses(
            self._listening, self._folder / "placements", self._config.log.level, self._config.log.format
        )
        try:
            await self._processes.start()
        except OSError as error:
            await self._processes.stop(0.0)
            raise ConfigError(
                f"server.workers: cannot start a router process ({error.strerror or error})"
            ) from None
        self._collecting = asyncio.create_task(
            self._desk.collect_forever(_COLLECT_EVERY_S, server.worker_timeout_s)
        )

    def _kill(self, worker: int, pid: int) -> None:
        if self._processes is not None:
            self._processes.kill(worker, pid)

    def why_not_ready(self) -> str | None:
        """None when every worker accepts requests."""
        missing = self._config.server.workers - len(self._desk.ready_workers())
        return f"{missing} of {self._config.server.workers} router workers are starting" if missing else None

    async def stop(self) -> None:
        """Let the workers finish their streams until the deadline, then end them."""
        for each in self._listening:
            each.close()
        if self._processes is not None:
            await self._processes.stop(self._config.server.shutdown_grace_s)
        if self._collecting is not None:
            self._collecting.cancel()
        self._desk.close()
        if self._rest is not None and self._rest_task is not None:
            self._rest.stop_soon()
            await self._rest_task

    def clear(self) -> None:
        """Remove the folder that the sockets were in."""
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _serve_rest(self, app: FastAPI) -> None:
        listening = private_socket(self._rest_path)
        self._rest = PlainServer(
            uvicorn.Config(
                app, ws="none", loop="none", log_config=None, access_log=False, server_header=False,
                date_header=False, backlog=BACKLOG, timeout_graceful_shutdown=1,
            )
        )  # fmt: skip
        self._rest_task = await self._rest.begin(listening)


def _listen_together(host: str, port: int, count: int) -> list[socket.socket]:
    """So many sockets on one port. Raises OSError when anybody else has it, sharing or not."""
    if port:
        listen(host, port).close()
    with ExitStack() as opened:
        sockets: list[socket.socket] = []
        for _ in range(count):
            each = opened.enter_context(listen(host, port, reuse_port=True))
            each.listen(BACKLOG)
            port = each.getsockname()[1]
            sockets.append(each)
        opened.pop_all()
        return sockets
