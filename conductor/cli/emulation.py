"""Starts emulated engines as processes of their own, watches them, restarts those that die, stops them all."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Iterator
from dataclasses import dataclass

import structlog

from conductor.cli.engine_nursery import EngineNursery, RunningEngine
from conductor.cluster_shape import read_cluster_shape
from conductor.config import PORTS_OF_AN_ENGINE, EmulationConfig
from conductor.configuration_faults import ConfigError
from conductor.instance_config import InstanceConfig
from conductor.placement import Role

_log = structlog.get_logger(__name__)

_STOP_GRACE_S = 5.0


@dataclass(frozen=True, slots=True)
class EngineProcess:
    """Arguments and ports of one emulated engine; the ports stay over restarts."""

    instance_id: str
    role: Role
    port: int
    event_port: int
    replay_port: int
    bootstrap_port: int
    arguments: tuple[str, ...]


class EmulatedCluster:
    """The engines of one shape, each a process that also ends by itself when this one is gone."""

    def __init__(
        self, config: EmulationConfig, *, host: str = "127.0.0.1", log_level: str = "warning"
    ) -> None:
        """Raises ConfigError where a port of theirs is taken."""
        assert config.cluster is not None
        self.host = host
        self._held_ports = contextlib.ExitStack()
        self.engines = _plan(config, host, log_level, self._held_ports)
        self._instance_class = config.profile
        self._protocol = config.protocol
        self._restart_after_s = config.restart_after_s
        self._nursery = EngineNursery()
        self._running: dict[str, RunningEngine] = {}
        self._keepers: list[asyncio.Task[None]] = []

    def instances(self) -> list[InstanceConfig]:
        """The engines as the rest of the configuration would list them."""
        return [
            InstanceConfig(
                id=engine.instance_id,
                url=f"http://{self.host}:{engine.port}",
                role=engine.role,
                instance_class=self._instance_class,
                protocol=self._protocol,
                bootstrap_port=engine.bootstrap_port,
            )
            for engine in self.engines
        ]

    def pids(self) -> dict[str, int]:
        return {name: running.pid for name, running in self._running.items()}

    async def start(self) -> None:
        """Spawn every engine and a keeper for each; returns before they answer."""
        for engine in self.engines:
            await self._spawn(engine)
        self._keepers = [asyncio.create_task(self._keep(engine)) for engine in self.engines]

    async def stop(self) -> None:
        """Ask every engine to stop, and kill those that have not after a few seconds."""
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        running = [engine for engine in self._running.values() if not engine.ended.done()]
        for engine in running:
            engine.send_signal(signal.SIGTERM)
        if running:
            _, late = await asyncio.wait([engine.ended for engine in running], timeout=_STOP_GRACE_S)
            if late:
                for engine in running:
                    if not engine.ended.done():
                        engine.send_signal(signal.SIGKILL)
                await asyncio.wait(late)
        await self._nursery.close()
        self._held_ports.close()

    async def _spawn(self, engine: EngineProcess) -> None:
        self._running[engine.instance_id] = await self._nursery.begin(
            engine.instance_id, list(engine.arguments)
        )

    async def _keep(self, engine: EngineProcess) -> None:
        while True:
            code = await asyncio.shield(self._running[engine.instance_id].ended)
            _log.warning(
                "emulated engine ended",
                instance=engine.instance_id,
                code=code,
                restart_after_s=self._restart_after_s,
            )
            await asyncio.sleep(self._restart_after_s)
            with contextlib.suppress(ConnectionError):  # it is tried again, as for any engine that has ended
                await self._spawn(engine)


def _plan(
    config: EmulationConfig, host: str, log_level: str, held_ports: contextlib.ExitStack
) -> list[EngineProcess]:
    shape = read_cluster_shape(config.cluster or "")
    roles = [role for role, count in shape.items() for _ in range(count)]
    count = PORTS_OF_AN_ENGINE * len(roles)
    asked_for = range(config.base_port, config.base_port + count) if config.base_port else [0] * count
    ports = [held_ports.enter_context(_held_port(host, port)) for port in asked_for]
    counts: dict[Role, int] = {}
    engines = []
    for i, role in enumerate(roles):
        number = counts[role] = counts.get(role, -1) + 1
        instance_id = f"{role}-{number}"
        # Replay ports lie behind all event ports, which an engine with several ranks counts up from.
        port, event_port, replay_port, bootstrap_port = ports[i :: len(roles)]
        arguments = (
            "--host", host, "--port", str(port), "--instance-id", instance_id, "--role", str(role),
            "--model", config.model, "--block-size", str(config.block_size), "--kv-blocks", str(config.kv_blocks),
            "--speed", str(config.speed), "--kv-event-port", str(event_port), "--kv-replay-port", str(replay_port),
            "--host-blocks", str(config.host_blocks),
            "--profile", config.profile, "--log-level", log_level,
            "--hand-off", config.protocol, "--bootstrap-port", str(bootstrap_port),
        )  # fmt: skip
        engines.append(
            EngineProcess(instance_id, role, port, event_port, replay_port, bootstrap_port, arguments)
        )
    return engines


@contextlib.contextmanager
def _held_port(host: str, port: int) -> Iterator[int]:
    """``port``, or with 0 a free one, that the kernel gives to nobody else; an engine may listen there, end, and
    come back. Raises ConfigError where somebody listens there.

    A socket bound with SO_REUSEADDR that does not listen keeps no other with that option from listening there
    (Linux, `inet_csk_bind_conflict`); a port only looked up would be anybody's until the engine has begun, and
    while it is away.
    """
    with socket.socket() as holding:
        holding.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            holding.bind((host, port))
        except OSError as error:
            raise ConfigError(
                f"emulation.base_port: {host}:{port} cannot be had ({error.strerror}); choose another --base-port"
            ) from None
        yield int(holding.getsockname()[1])
