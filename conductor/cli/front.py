"""What `conductor serve` starts as its front door, in one process or in several."""

from __future__ import annotations

import errno
from collections.abc import Awaitable, Callable
from typing import Final, Protocol

from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from conductor.configuration_faults import ConfigError
from router import ApiKey

_OF_PORTS: Final = (errno.EADDRINUSE, errno.EACCES)


class Front(Protocol):
    """Accepts requests on the configured address."""

    @property
    def registry(self) -> CollectorRegistry:
        """Of all that GET /metrics shows."""

    @property
    def exposition(self) -> Callable[[], Awaitable[bytes]] | None:
        """The metrics as text, where they are more than those of the services' registry."""

    @property
    def url(self) -> str:
        """Once started."""

    async def start(self, app: FastAPI) -> None:
        """Listen; ``app`` answers what is no inference. Raises ConfigError naming what cannot be had."""

    def why_not_ready(self) -> str | None:
        """None when requests are accepted everywhere."""

    def instance_lost(self, instance_id: str, reason: str) -> None:
        """What waits for that instance is placed anew."""

    def reload_certificate(self) -> None:
        """It was renewed."""

    def use_keys(self, keys: list[ApiKey]) -> None:
        """They were read again; the services know them."""

    async def stop(self) -> None:
        """Let streams finish until the deadline, then end them."""

    def clear(self) -> None:
        """Leave nothing behind, started or not."""


def cannot_listen(host: str, port: int, error: OSError) -> ConfigError:
    reason, flag = error.strerror or error, "port with --port" if error.errno in _OF_PORTS else "--host"
    return ConfigError(f"cannot listen on {host}:{port} ({reason}); choose another {flag}")
