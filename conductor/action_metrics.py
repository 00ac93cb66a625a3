"""Prometheus metrics of tier actions, read from the ledger when scraped."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from conductor.action_runner import ActionRunner
from conductor.tier_planning import TierPlanning


class ActionCollector(Collector):
    """Actions by kind, executor and outcome; what they moved, how long they took and what they promised."""

    def __init__(self, runner: ActionRunner, planning: TierPlanning | None = None) -> None:
        self._runner = runner
        self._planning = planning

    def collect(self) -> Iterator[Metric]:
        ledger = self._runner.ledger
        under_way = GaugeMetricFamily(
            "conductor_actions_under_way", "Tier actions planned and running", labels=["state"]
        )
        for state, count in ledger.counts().items():
            under_way.add_metric([state], count)
        yield under_way
        moving = GaugeMetricFamily(
            "conductor_action_bytes_under_way",
            "KV bytes that tier actions move now, by link",
            labels=["instance", "direction"],
        )
        for link, kv_bytes in ledger.budgets.under_way_bytes().items():
            moving.add_metric([link.instance_id, link.direction], kv_bytes)
        yield moving
        for name, text, field in (
            ("conductor_actions_ended", "Tier actions by how they ended", "actions"),
            ("conductor_action_blocks", "Blocks that they placed, kept or dropped", "blocks"),
            ("conductor_action_moved_bytes", "KV bytes that they moved", "moved_bytes"),
            ("conductor_action_seconds", "Time that they ran", "seconds"),
            (
                "conductor_action_predicted_benefit_seconds",
                "Seconds of time to first token that they were to save",
                "benefit_s",
            ),
        ):
            family = CounterMetricFamily(name, text, labels=["kind", "executor", "outcome"])
            for key, tally in ledger.tallies.items():
                family.add_metric([key.kind, key.executor, key.outcome], getattr(tally, field))
            yield family
        faults = CounterMetricFamily(
            "conductor_action_executor_faults", "Errors of executors' own", labels=["executor"]
        )
        for executor, count in self._runner.faults.items():
            faults.add_metric([executor], count)
        yield faults
        if self._planning is not None:
            yield CounterMetricFamily(
                "conductor_tier_plans", "Rounds of the tier planner", value=self._planning.plans
            )
            yield CounterMetricFamily(
                "conductor_tier_planning_seconds", "Time that they took", value=self._planning.planning_s
            )
