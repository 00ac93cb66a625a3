"""What SIGHUP has read again: the keys of clients, and certificates."""

from __future__ import annotations

import os
from collections.abc import Callable

import structlog

from conductor.cli.access import api_keys, rest_keys
from conductor.cli.front import Front
from conductor.config import Config
from conductor.configuration_faults import ConfigError
from router import KeyRing
from router.services import RouterServices
from router.workers.router_desk import RouterDesk

_log = structlog.get_logger(__name__)


class ReadAgain:
    """Called on SIGHUP; what comes before ``serve`` is done then. ``read`` gives the configuration as it is now."""

    def __init__(self, config: Config, read: Callable[[], Config]) -> None:
        self._config = config
        self._read = read
        self._asked = False
        self._tell: Callable[[], None] | None = None

    @property
    def has_anything(self) -> bool:
        return bool(self._config.api_keys) or self._config.server.tls is not None

    def __call__(self) -> None:
        self._asked = True
        if self._tell is not None:
            self._tell()

    def serve(
        self, services: RouterServices, rest: KeyRing | None, front: Front, desk: RouterDesk | None
    ) -> None:
        """Keys are those of ``services`` and of the REST API; other processes hear of them by front and desk."""

        def tell() -> None:
            if self._config.server.tls is not None:
                front.reload_certificate()
            self._read_keys(services, rest, front, desk)

        self._tell = tell
        if self._asked:
            tell()

    def _read_keys(
        self, services: RouterServices, rest: KeyRing | None, front: Front, desk: RouterDesk | None
    ) -> None:
        try:
            config = self._read()
            keys = api_keys(config, os.environ)
            others = rest_keys(config.model_copy(update={"server": self._config.server}), os.environ)
        except ConfigError as error:
            _log.error("the configuration was not read again; all stays as it was", reason=str(error))
            return
        if services.use_keys(keys or None) and keys:
            assert rest is not None
            rest.replace(others)
            front.use_keys(keys)
            if desk is not None:
                desk.use_keys(keys)
        changed = [
            name
            for name in Config.model_fields
            if name != "api_keys" and getattr(config, name) != getattr(self._config, name)
        ]
        if changed:
            _log.warning("other settings have changed too; a restart uses them", settings=changed)
