"""Prometheus figures of the shared state."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from conductor.shared_state.sharing import SharedState


class SharedStateCollector(Collector):
    """Read when it is scraped."""

    def __init__(self, shared: SharedState) -> None:
        self._shared = shared

    def collect(self) -> Iterator[Metric]:
        shared, counts = self._shared, self._shared.counts
        gauges = {
            "conductor_shared_state_up": ("1 while Redis answers", float(shared.state == "up")),
            "conductor_leader": ("1 while this replica leads", float(bool(shared.token))),
            "conductor_leader_token": ("Highest token of a leader that was heard of", shared.lease.highest),
            "conductor_replicas": (
                "Replicas that share the state, as last heard",
                len(shared.peers) if shared.state == "up" else 1,
            ),
            "conductor_registry_conflicts": (
                "Instances that this replica's file describes otherwise than the registry",
                len(shared.registry.conflicts),
            ),
            "conductor_ranks_placed_elsewhere": (
                "Ranks that other replicas have requests on",
                shared.others_placed,
            ),
        }
        for name, (documentation, value) in gauges.items():
            yield GaugeMetricFamily(name, documentation, value)
        counters = {
            "conductor_leader_terms": ("Times that this replica became the leader", shared.lease.terms),
            "conductor_shared_state_turns": ("Exchanges with Redis", counts.turns),
            "conductor_shared_state_failures": ("Exchanges that Redis did not answer", counts.failures),
            "conductor_shared_state_losses": ("Times that Redis went away", counts.losses),
            "conductor_shared_state_faults": ("Shared entries that cannot be used", counts.faults),
            "conductor_actions_refused": ("Actions refused for want of leadership", counts.refused_actions),
        }
        for name, (documentation, value) in counters.items():
            yield CounterMetricFamily(name, documentation, value)
