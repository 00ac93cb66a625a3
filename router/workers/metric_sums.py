"""One answer to GET /metrics for all workers: the conductor's own figures plus the sum of theirs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from router.workers.messages import MetricFamily

_STATES = frozenset(("conductor_token_cache_enabled",))  # gauges of which the sum says nothing
_REQUESTS = "conductor_requests"

_Sample = tuple[str, tuple[tuple[str, str], ...]]


def families_of(registry: CollectorRegistry) -> list[MetricFamily]:
    """What a registry would show now."""
    return [_family(metric) for metric in registry.collect()]


@dataclass(slots=True)
class _Figures:
    """Of one worker: those of its present process, and what its former ones had counted."""

    latest: dict[str, MetricFamily] = field(default_factory=dict)
    former: dict[str, MetricFamily] = field(default_factory=dict)


class SummedMetrics(Collector):
    """``starts`` are how often each worker's process was started, ``killed`` how often for want of an answer.

    ``ready`` are those that accept requests.
    """

    def __init__(
        self,
        own: CollectorRegistry,
        starts: Callable[[], Mapping[int, int]] = dict,
        ready: Callable[[], Iterable[int]] = tuple,
        killed: Callable[[], Mapping[int, int]] = dict,
    ) -> None:
        self._own = own
        self._starts = starts
        self._ready = ready
        self._killed = killed
        self._workers: defaultdict[int, _Figures] = defaultdict(_Figures)

    def report(self, worker: int, families: list[MetricFamily]) -> None:
        self._workers[worker].latest = {family.name: family for family in families}

    def gone(self, worker: int) -> None:
        """Its process has ended: what it counted stays, its gauges do not."""
        figures = self._workers[worker]
        counted = [family for family in figures.latest.values() if family.kind != "gauge"]
        figures.former = _added([*figures.former.values(), *counted])
        figures.latest = {}

    def collect(self) -> Iterator[Metric]:
        families = families_of(self._own)
        for figures in self._workers.values():
            families += figures.former.values()
            families += figures.latest.values()
        for family in _added(families).values():
            yield _metric(family)
        yield from self._by_worker()

    def _by_worker(self) -> Iterator[Metric]:
        answered = CounterMetricFamily(
            "conductor_worker_requests", "Inference requests answered.", labels=("worker",)
        )
        started = CounterMetricFamily(
            "conductor_worker_starts", "Processes started for this worker.", labels=("worker",)
        )
        killed = CounterMetricFamily(
            "conductor_worker_killed", "Processes killed because they did not answer.", labels=("worker",)
        )
        killed_before = self._killed()
        up = GaugeMetricFamily("conductor_worker_up", "1 while it accepts requests.", labels=("worker",))
        ready = set(self._ready())
        for worker, starts in self._starts().items():
            figures = self._workers[worker]
            parts = (figures.former.get(_REQUESTS), figures.latest.get(_REQUESTS))
            samples = [sample for part in parts if part is not None for sample in part.samples]
            total = sum(value for name, _, value in samples if name == f"{_REQUESTS}_total")
            answered.add_metric((str(worker),), total)
            started.add_metric((str(worker),), starts)
            killed.add_metric((str(worker),), killed_before.get(worker, 0))
            up.add_metric((str(worker),), float(worker in ready))
        yield from (answered, started, killed, up)


def _family(metric: Metric) -> MetricFamily:
    samples = [(sample.name, dict(sample.labels), float(sample.value)) for sample in metric.samples]
    return MetricFamily(metric.name, metric.type, metric.documentation, samples)


def _metric(family: MetricFamily) -> Metric:
    metric = Metric(family.name, family.documentation, family.kind)
    for name, labels, value in family.samples:
        metric.add_sample(name, labels, value)
    return metric


def _added(families: Iterable[MetricFamily]) -> dict[str, MetricFamily]:
    """Families of one name in one, with samples of equal labels added."""
    first: dict[str, MetricFamily] = {}
    totals: defaultdict[str, dict[_Sample, float]] = defaultdict(dict)
    for family in families:
        first.setdefault(family.name, family)
        total = totals[family.name]
        for name, labels, value in family.samples:
            key = (name, tuple(labels.items()))
            before = total.get(key, 0.0)
            total[key] = max(before, value) if family.name in _STATES else before + value
    return {
        name: MetricFamily(
            name,
            family.kind,
            family.documentation,
            [(sample, dict(labels), value) for (sample, labels), value in totals[name].items()],
        )
        for name, family in first.items()
    }
