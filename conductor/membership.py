"""Who belongs to the cluster while it runs: instances join, are replaced, are drained and leave."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Protocol

import structlog

from conductor.catalogue import INSTANCE_CLASSES
from conductor.cluster import Health, InstanceState, make_instance
from conductor.discovery import EventEndpoints
from conductor.instance_config import InstanceConfig
from conductor.scheduler import Scheduler

_log = structlog.get_logger(__name__)

_CHECK_S = 0.5
CONFIGURATION = "configuration"  # the list of instances that a conductor starts with
REST = "rest"


class InstanceWatcher(Protocol):
    """What probes instances and follows their streams (`ClusterMonitor`)."""

    def watch(self, instance: InstanceState, endpoints: dict[int, EventEndpoints] | None = None) -> None: ...

    def forget(self, instance_id: str) -> None: ...


class UnknownInstanceError(Exception):
    """No instance of this id is in the cluster."""


def instance_of(config: InstanceConfig) -> InstanceState:
    """An instance as it is configured, not probed yet. Raises ValueError when the URL cannot be used."""
    return make_instance(
        instance_id=config.id,
        url=config.url,
        role=config.role,
        instance_class=config.speeds.applied_to(INSTANCE_CLASSES[config.instance_class]),
        protocol=config.protocol,
        bootstrap_port=config.bootstrap_port,
        ranks=config.ranks,
        block_size=config.block_size,
        api_key=config.api_key.get_secret_value() if config.api_key is not None else None,
        location=config.location,
        fetches_from_peers=config.fetches_from_peers,
        streams_layers=config.streams_layers,
    )


def endpoints_of(config: InstanceConfig) -> dict[int, EventEndpoints] | None:
    """Where its ranks publish KV events, if that is configured; None: ask the engine."""
    if config.kv_events is None:
        return None
    return {
        rank: EventEndpoints(stream.endpoint, stream.replay_endpoint, stream.topic)
        for rank, stream in enumerate(config.kv_events)
    }


class Membership:
    """Changes scheduler and watcher together. Not thread-safe: one event loop."""

    def __init__(
        self, scheduler: Scheduler, clock: Callable[[], float], configured: Iterable[InstanceConfig] = ()
    ) -> None:
        """``configured`` are in the cluster already."""
        self._scheduler = scheduler
        self._clock = clock
        self._configs = {config.id: config for config in configured}
        self._sources = dict.fromkeys(self._configs, CONFIGURATION)
        self._deadlines: dict[str, float] = {}  # of instances that drain
        self.watcher: InstanceWatcher | None = None
        self.removed = 0

    def configs(self) -> list[InstanceConfig]:
        """Of the instances in the cluster now, as far as they were configured."""
        return list(self._configs.values())

    def source_of(self, instance_id: str) -> str | None:
        """Who brought it: the configuration, the REST API, or what discovered it; None: it is not there."""
        return self._sources.get(instance_id)

    def usable(self, config: InstanceConfig) -> InstanceState:
        """The instance of a description, which changes nothing. Raises ValueError for what cannot be one."""
        instance = instance_of(config)
        self._scheduler.cluster.topology.location_ids(config.location, config.id)
        return instance

    def put(self, config: InstanceConfig, source: str = REST) -> bool:
        """Add an instance, or replace the one of that id; False when nothing had to change but whose it is.

        What is placed on a replaced instance runs to its end; its cache is forgotten. Raises ValueError for what
        cannot be an instance; then nothing has changed.
        """
        current = self._scheduler.cluster.get(config.id)
        if current is not None and config == self._configs.get(config.id) and not current.draining:
            self._sources[config.id] = source
            self.readmit(config.id)
            return False
        instance = self.usable(config)
        if current is not None:
            self.remove(config.id)
        self._scheduler.add_instance(instance)
        self._configs[config.id] = config
        self._sources[config.id] = source
        if self.watcher is not None:
            self.watcher.watch(instance, endpoints_of(config))
        _log.info("instance added", instance=config.id, role=str(config.role), url=config.url, source=source)
        return True

    def remove(self, instance_id: str) -> None:
        """Take an instance out at once. Raises UnknownInstanceError."""
        self._known(instance_id)
        if self.watcher is not None:
            self.watcher.forget(instance_id)
        self._scheduler.remove_instance(instance_id)
        self._configs.pop(instance_id, None)
        self._sources.pop(instance_id, None)
        self._deadlines.pop(instance_id, None)
        self.removed += 1
        _log.info("instance removed", instance=instance_id)

    def drain(self, instance_id: str, within_s: float) -> int:
        """Place nothing more there, and remove it when what runs there has ended, at the latest in ``within_s``.

        Returns the placements under way. Raises UnknownInstanceError.
        """
        instance = self._known(instance_id)
        self._scheduler.drain_instance(instance_id)
        self._deadlines[instance_id] = self._clock() + within_s
        _log.info("instance drains", instance=instance_id, within_s=within_s)
        return _under_way(instance)

    def withhold(self, instance_id: str, reason: str) -> None:
        """Place nothing more there until `readmit`; what it has cached is kept. Raises UnknownInstanceError."""
        if self._known(instance_id).withheld is None:
            _log.warning("instance is withheld", instance=instance_id, reason=reason)
        self._scheduler.withhold_instance(instance_id, reason)

    def readmit(self, instance_id: str) -> None:
        """The end of `withhold`. Raises UnknownInstanceError."""
        if self._known(instance_id).withheld is not None:
            _log.info("instance is no longer withheld", instance=instance_id)
            self._scheduler.readmit_instance(instance_id)

    def check_drained(self) -> None:
        """Remove the draining instances that have nothing left to do, or no time, or that are gone anyway."""
        for instance_id, deadline_s in list(self._deadlines.items()):
            instance = self._scheduler.cluster.get(instance_id)
            if instance is None:
                del self._deadlines[instance_id]
            elif not _under_way(instance) or instance.health is Health.DOWN or self._clock() >= deadline_s:
                self.remove(instance_id)

    async def check_forever(self) -> None:
        """Let draining instances go."""
        while True:
            await asyncio.sleep(_CHECK_S)
            self.check_drained()

    def _known(self, instance_id: str) -> InstanceState:
        instance = self._scheduler.cluster.get(instance_id)
        if instance is None:
            known = ", ".join(i.instance_id for i in list(self._scheduler.cluster)[:20]) or "none"
            raise UnknownInstanceError(f"instance {instance_id!r} is not in the cluster; known: {known}")
        return instance


def _under_way(instance: InstanceState) -> int:
    """Placements that have not ended on it, and transfers from it."""
    return sum(len(rank.under_way()) + rank.transfers_out for rank in instance.ranks)
