"""What SIGHUP has read again: keys and certificates."""

from __future__ import annotations

import os
from collections.abc import Callable

import structlog

from conductor.cli.access import api_keys, rest_keys
from conductor.cli.front import Front
from conductor.config import Config
from conductor.configuration_faults import ConfigError
from router import ApiKey, KeyRing
from router.services import RouterServices
from router.workers.router_desk import RouterDesk

_log = structlog.get_logger(__name__)

# Takes the keys of clients, and those that the REST API takes.
UseKeys = Callable[[list[ApiKey], list[ApiKey]], None]


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

    def serve(self, reload_certificate: Callable[[], None], use_keys: UseKeys) -> None:
        """From now on there is somebody to tell."""

        def tell() -> None:
            if self._config.server.tls is not None:
                reload_certificate()
            self._read_configuration(use_keys)

        self._tell = tell
        if self._asked:
            tell()

    def _read_configuration(self, use_keys: UseKeys) -> None:
        try:
            config = self._read()
            keys = api_keys(config, os.environ)
            # The token is used for more than the REST API: it stays.
            others = rest_keys(config.model_copy(update={"server": self._config.server}), os.environ)
        except ConfigError as error:
            _log.error("the configuration was not read again; all stays as it was", reason=str(error))
            return
        use_keys(keys, others)
        changed = [
            name
            for name in Config.model_fields
            if name != "api_keys" and getattr(config, name) != getattr(self._config, name)
        ]
        if changed:
            _log.warning("other settings have changed too; a restart uses them", settings=changed)


def keys_of_front_door(
    services: RouterServices, rest: KeyRing | None, front: Front, desk: RouterDesk | None
) -> UseKeys:
    """Of clients and of the REST API; workers and routers elsewhere hear of them by ``front`` and ``desk``."""

    def use_keys(keys: list[ApiKey], others: list[ApiKey]) -> None:
        if services.use_keys(keys) and keys:
            assert rest is not None
            rest.replace(others)
            front.use_keys(keys)
            if desk is not None:
                desk.use_keys(keys)

    return use_keys


def keys_of_index(ring: KeyRing | None) -> UseKeys:
    """Where there is no front door."""

    def use_keys(_: list[ApiKey], others: list[ApiKey]) -> None:
        if ring is not None and others:
            ring.replace(others)
            _log.info("keys were read again", keys=len(others))
        elif ring is not None or others:
            _log.error(
                "the keys stay as they were: this asks for keys, or for none, until it stops",
                remedy="restart it",
            )

    return use_keys
