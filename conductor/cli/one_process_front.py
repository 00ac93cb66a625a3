"""The front door in the conductor's own process."""

from __future__ import annotations

from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from conductor.cli.front import cannot_listen
from conductor.cli.front_door_options import reload_certificate
from conductor.config import Config
from router import ApiKey
from router.server import FrontDoorServer
from router.services import RouterServices
from router.tls import ServerTls


class OneProcessFront:
    """A `Front` without workers."""

    exposition = None

    def __init__(self, config: Config, services: RouterServices, tls: ServerTls | None) -> None:
        self._server_config = config.server
        self._services = services
        self._tls = tls
        self._server: FrontDoorServer | None = None

    @property
    def registry(self) -> CollectorRegistry:
        return self._services.metrics.registry

    @property
    def url(self) -> str:
        assert self._server is not None
        return self._server.url

    async def start(self, app: FastAPI) -> None:
        """Raises ConfigError when the address cannot be bound."""
        host, port = self._server_config.host, self._server_config.port
        context = None if self._tls is None else self._tls.context
        self._server = FrontDoorServer(app, self._services, host=host, port=port, tls=context)
        try:
            await self._server.start()
        except OSError as error:
            raise cannot_listen(host, port, error) from None

    def why_not_ready(self) -> str | None:
        return None

    def instance_lost(self, instance_id: str, reason: str) -> None:
        self._services.instance_lost(instance_id, reason)

    def reload_certificate(self) -> None:
        if self._tls is not None:
            reload_certificate(self._tls)

    def use_keys(self, keys: list[ApiKey]) -> None:
        pass

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop()

    def clear(self) -> None:
        pass
