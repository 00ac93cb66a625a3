"""Prometheus gauges of the cluster, read from its live state when they are scraped."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from conductor.cluster import Health
from conductor.scheduler import Scheduler


class ClusterCollector(Collector):
    """Instances and reservations."""

    def __init__(self, scheduler: Scheduler, clock: Callable[[], float]) -> None:
        self._scheduler = scheduler
        self._clock = clock

    def collect(self) -> Iterator[Metric]:
        yield from self._instances()
        active = self._scheduler.active_placements
        yield GaugeMetricFamily("conductor_active_placements", "Placements under way", active)

    def _instances(self) -> Iterator[Metric]:
        up = GaugeMetricFamily(
            "conductor_instance_up", "1 while the instance is a candidate", labels=["instance", "role"]
        )
        suspensions = CounterMetricFamily(
            "conductor_instance_suspensions", "Times that it failed too many requests", labels=["instance"]
        )
        labels = ["instance", "rank"]
        queue = GaugeMetricFamily("conductor_prefill_queue_seconds", "Predicted queue", labels=labels)
        prefills = GaugeMetricFamily(
            "conductor_pending_prefills", "Prefills placed, not ended", labels=labels
        )
        decodes = GaugeMetricFamily("conductor_active_decodes", "Requests placed, not ended", labels=labels)
        placements = CounterMetricFamily("conductor_placements", "Placements made", labels=labels)
        scale = GaugeMetricFamily(
            "conductor_prefill_scale",
            "Learned correction of predicted prefill times",
            labels=["instance_class"],
        )
        by_health = GaugeMetricFamily(
            "conductor_instances", "Instances by what may be placed there", labels=["role", "health"]
        )
        counts = Counter((instance.role, instance.health) for instance in self._scheduler.cluster)
        for role in sorted({role for role, _ in counts}):
            for health in Health:
                by_health.add_metric([role, health], counts[role, health])
        now_s = self._clock()
        for instance in self._scheduler.cluster:
            up.add_metric(
                [instance.instance_id, instance.role], float(instance.health in (Health.UP, Health.PROBING))
            )
            suspensions.add_metric([instance.instance_id], instance.circuit.suspensions)
            for rank in instance.ranks:
                values = [instance.instance_id, str(rank.target.rank)]
                queue.add_metric(values, rank.queue_s(now_s))
                prefills.add_metric(values, rank.pending_prefills)
                decodes.add_metric(values, rank.active_decodes)
                placements.add_metric(values, rank.placements)
        for name, calibration in self._scheduler.calibrations.items():
            scale.add_metric([name], calibration.prefill.factor)
        yield from (up, by_health, suspensions, queue, prefills, decodes, placements, scale)
