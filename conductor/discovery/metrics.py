"""Prometheus metrics of the sources that instances come from, read when they are scraped."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from conductor.discovery.roll import Roll


class DiscoveryCollector(Collector):
    """What each source lists, and whether it can be heard."""

    def __init__(self, roll: Roll) -> None:
        self._roll = roll

    def collect(self) -> Iterator[Metric]:
        name, labels = "conductor_discovery", ["source"]
        instances = GaugeMetricFamily(f"{name}_instances", "Instances that a source lists", labels=labels)
        refused = GaugeMetricFamily(
            f"{name}_refused_instances", "Of these, left out: unusable, or another's", labels=labels
        )
        up = GaugeMetricFamily(f"{name}_source_up", "1 while the source can be heard", labels=labels)
        synced = GaugeMetricFamily(
            f"{name}_last_sync_timestamp_seconds", "When the source was last heard, Unix time", labels=labels
        )
        failures = CounterMetricFamily(
            f"{name}_failures", "Times that the source could not be read", labels=labels
        )
        changes = CounterMetricFamily(
            f"{name}_changes", "Changes of a source's list, applied", labels=[*labels, "change"]
        )
        for state in self._roll.sources.values():
            source = [state.name]
            instances.add_metric(source, len(state.listed) + len(state.refused.keys() - state.listed.keys()))
            refused.add_metric(source, len(state.refused))
            up.add_metric(source, float(state.error is None and state.synced_s is not None))
            if state.synced_s is not None:
                synced.add_metric(source, state.synced_s)
            failures.add_metric(source, state.failures)
            for change, count in sorted(state.changes.items()):
                changes.add_metric([*source, change], count)
        yield from (instances, refused, up, synced, failures, changes)
