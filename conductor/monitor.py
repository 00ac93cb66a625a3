"""Watches the engines: probes their health, learns what they serve, follows their KV events and gauges."""

from __future__ import annotations

import asyncio
import itertools
import ssl
from collections.abc import Callable
from typing import Final

import structlog

from cache_index import EventSource, Holder
from conductor.cluster import Health, InstanceState
from conductor.discovery import (
    EngineClient,
    EventEndpoints,
    ProbeError,
    UnreachableError,
    fetch_metrics,
    key_headers,
    load_endpoints,
    probe,
    stream_configs,
)
from conductor.rank import ReportedLoad
from conductor.scheduler import Scheduler

_log = structlog.get_logger(__name__)

_AT_ONCE: Final = (
    256  # probes: those of a thousand instances would wait for each other until all are too late
)
_STARTED_WITHIN: Final = 5  # probes: engines that are started at the same time need some
_GOLDEN_RATIO: Final = 0.618034


class ClusterMonitor:
    """One task an instance: health every ``interval_s``; on the way up everything is discovered anew.

    An engine that refuses connections is down at once; one that is slow or answers errors is down after
    ``unhealthy_after`` probes in a row. When it comes back its event stream is read from the start, so nothing
    that its former life cached survives. ``on_up`` is called with an instance before its events are followed,
    ``on_down`` with the instance and the reason, ``on_left`` with every rank of an instance that leaves,
    ``follow_load`` with every rank that publishes its load, the endpoint and the topic, ``unfollow_load`` as
    ``on_left``.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        events: EventSource,
        clock: Callable[[], float],
        *,
        interval_s: float,
        timeout_s: float,
        unhealthy_after: int,
        tls: ssl.SSLContext | None = None,
        endpoint_overrides: dict[str, dict[int, EventEndpoints]] | None = None,
        on_up: Callable[[InstanceState], None] = lambda instance: None,
        on_down: Callable[[str, str], None] = lambda instance_id, reason: None,
        on_left: Callable[[Holder], None] = lambda holder: None,
        follow_load: Callable[[Holder, str, str], None] = lambda holder, endpoint, topic: None,
        unfollow_load: Callable[[Holder], None] = lambda holder: None,
    ) -> None:
        self._scheduler = scheduler
        self._events = events
        self._clock = clock
        self._interval_s = interval_s
        self._unhealthy_after = unhealthy_after
        self._on_up = on_up
        self._on_down = on_down
        self._on_left = on_left
        self._follow_load = follow_load
        self._unfollow_load = unfollow_load
        self._overrides = dict(endpoint_overrides or {})
        self._client = EngineClient(timeout_s, tls)
        self._turns = asyncio.Semaphore(_AT_ONCE)
        self._numbers = itertools.count(1)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._streams: dict[str, list[str]] = {}

    def start(self) -> None:
        for instance in self._scheduler.cluster:
            self.watch(instance, self._overrides.get(instance.instance_id))

    def watch(self, instance: InstanceState, endpoints: dict[int, EventEndpoints] | None = None) -> None:
        """Follow an instance of the cluster from now on; ``endpoints`` of KV events where it does not tell them."""
        if endpoints is not None:
            self._overrides[instance.instance_id] = endpoints
        self._tasks[instance.instance_id] = asyncio.create_task(
            self._watch(instance), name=f"watch {instance.instance_id}"
        )

    def forget(self, instance_id: str) -> None:
        """The instance leaves the cluster: stop to probe it and to follow what it publishes."""
        task = self._tasks.pop(instance_id, None)
        if task is not None:
            task.cancel()
        self._overrides.pop(instance_id, None)
        self._streams.pop(instance_id, None)
        instance = self._scheduler.cluster.get(instance_id)
        for rank in instance.ranks if instance is not None else ():
            self._events.remove_stream(rank.holder)
            self._unfollow_load(rank.holder)
            self._on_left(rank.holder)

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._client.close()

    async def _watch(self, instance: InstanceState) -> None:
        failures = 0
        # After the first check an instance has a moment of its own within the interval, evenly spread by the golden
        # ratio: requests would wait for the checks of all at once.
        pause_s = self._interval_s * (next(self._numbers) * _GOLDEN_RATIO % 1.0)
        while True:
            try:
                async with self._turns:
                    await self._check(instance)
                failures = 0
            except ProbeError as error:
                failures += 1
                if failures == _STARTED_WITHIN and instance.facts is None:
                    _log.warning("instance has not come up", instance=instance.instance_id, reason=str(error))
                if isinstance(error, UnreachableError) or failures >= self._unhealthy_after:
                    self._mark_down(instance, str(error))
            except Exception:
                _log.exception("health check failed unexpectedly", instance=instance.instance_id)
            await asyncio.sleep(pause_s)
            pause_s = self._interval_s

    async def _check(self, instance: InstanceState) -> None:
        response = await self._client.ask(instance.url, "/health", key_headers(instance))
        if response.status != 200:
            raise ProbeError(f"GET /health answered {response.status}")
        if instance.health in (Health.STARTING, Health.DOWN):
            await self._bring_up(instance)
            return
        metrics = await fetch_metrics(self._client, instance.url, self._clock(), key_headers(instance))
        self._report(instance, metrics.loads)

    async def _bring_up(self, instance: InstanceState) -> None:
        returning = instance.facts is not None
        facts, endpoints, metrics = await probe(self._client, instance, self._clock())
        endpoints = self._overrides.get(instance.instance_id, endpoints)
        streams = stream_configs(instance, facts, endpoints)
        self._scheduler.instance_up(instance.instance_id, facts)
        self._on_up(instance)
        known = self._streams.get(instance.instance_id)
        if known == [s.endpoint for s in streams]:
            for stream in streams:
                self._events.resync(stream.holder)
        else:
            for rank in instance.ranks:
                if known is not None:
                    self._events.remove_stream(rank.holder)
            for stream in streams:
                self._events.add_stream(stream)
            self._streams[instance.instance_id] = [s.endpoint for s in streams]
        for holder, found in load_endpoints(instance, endpoints).items():
            if found.load_endpoint is not None:
                self._follow_load(holder, found.load_endpoint, found.load_topic)
        self._report(instance, metrics.loads)
        _log.info(
            "instance is back" if returning else "instance is up",
            instance=instance.instance_id,
            role=str(instance.role),
            models=[m.name for m in facts.models],
            block_size=instance.block_size,
            kv_events=bool(streams),
        )

    def _report(self, instance: InstanceState, loads: dict[int, ReportedLoad]) -> None:
        for rank, load in loads.items():
            if rank < len(instance.ranks):
                self._scheduler.report_load(instance.instance_id, rank, load)

    def _mark_down(self, instance: InstanceState, reason: str) -> None:
        if instance.health is not Health.DOWN:
            if instance.health is not Health.STARTING:
                _log.warning("instance is down", instance=instance.instance_id, reason=reason)
            for rank in instance.ranks:  # the scheduler forgets what it held: so must its stream
                self._events.resync(rank.holder)
            self._scheduler.instance_down(instance.instance_id, reason)
            self._on_down(instance.instance_id, reason)
