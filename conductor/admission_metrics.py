"""Prometheus metrics of admission: who was turned away, and who waits."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from conductor.admission import Gate
from conductor.dispatcher import Dispatcher


class AdmissionCollector(Collector):
    """Read from the live state when it is scraped."""

    def __init__(self, gate: Gate, dispatcher: Dispatcher) -> None:
        self._gate = gate
        self._dispatcher = dispatcher

    def collect(self) -> Iterator[Metric]:
        rejections = CounterMetricFamily(
            "conductor_rejections", "Requests that admission turned away", labels=["stage"]
        )
        for stage, count in self._gate.rejections.items():
            rejections.add_metric([stage], count)
        yield rejections
        held = GaugeMetricFamily(
            "conductor_held_requests", "Requests waiting at the router", labels=["tenant"]
        )
        room = self._dispatcher.room
        for tenant, count in (room.waiting_by_tenant() if room is not None else {}).items():
            held.add_metric([tenant], count)
        yield held
