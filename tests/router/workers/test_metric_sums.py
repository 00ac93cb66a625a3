"""Figures of several processes add up to those of one, and none go back when a process ends."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from router.workers.messages import Samples, encode, from_worker
from router.workers.metric_sums import SummedMetrics, families_of

LATENCIES = (0.1, 1.0, 10.0)


class Process:
    """One process's metrics, of each kind there is."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter("conductor_requests", "Answers.", ("code",), registry=self.registry)
        self.open = Gauge("open", "Now.", registry=self.registry)
        self.latency = Histogram("latency", "Seconds.", buckets=LATENCIES, registry=self.registry)

    def serve(self, code: int, seconds: float) -> None:
        self.requests.labels(str(code)).inc()
        self.open.inc()
        self.latency.observe(seconds)


events = st.lists(
    st.tuples(st.integers(0, 3), st.sampled_from([200, 404]), st.sampled_from([0.0, 0.5, 5.0, 50.0])),
    max_size=30,
)


def _values(registry: CollectorRegistry) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in registry.collect()
        for sample in family.samples
        if not sample.name.endswith("_created") and not sample.name.startswith("conductor_worker")
    }


@given(events)
def test_several_processes_show_what_one_would(served: list[tuple[int, int, float]]) -> None:
    one, several = Process(), [Process() for _ in range(4)]
    for process, code, seconds in served:
        one.serve(code, seconds)
        several[process].serve(code, seconds)
    sums = SummedMetrics(several[0].registry)
    for number, process in enumerate(several[1:]):
        told = from_worker(encode(Samples(families_of(process.registry))))
        assert isinstance(told, Samples)
        sums.report(number, told.families)
    shown = CollectorRegistry()
    shown.register(sums)
    assert _values(shown) == _values(one.registry)
    assert b"# TYPE latency histogram" in generate_latest(shown)


@pytest.fixture
def summed() -> tuple[SummedMetrics, Callable[..., float]]:
    sums = SummedMetrics(CollectorRegistry(), lambda: {0: 2, 1: 1}, lambda: [1])
    registry = CollectorRegistry()
    registry.register(sums)

    def value(name: str, **labels: str) -> float:
        return registry.get_sample_value(name, labels) or 0.0

    return sums, value


def test_what_a_dead_process_counted_stays(summed: tuple[SummedMetrics, Callable[..., float]]) -> None:
    sums, value = summed
    for life in range(1, 4):
        process = Process()
        process.serve(200, 0.5)
        process.serve(500, 5.0)
        sums.report(0, families_of(process.registry))
        assert value("open") == 2
        sums.gone(0)
        assert value("open") == 0
        assert value("conductor_requests_total", code="200") == life
        assert value("latency_count") == 2 * life
        assert value("conductor_worker_requests_total", worker="0") == 2 * life
    sums.gone(0)
    assert value("conductor_requests_total", code="500") == 3


def test_each_worker_is_shown(summed: tuple[SummedMetrics, Callable[..., float]]) -> None:
    _, value = summed
    assert [value("conductor_worker_up", worker=number) for number in "01"] == [0, 1]
    assert [value("conductor_worker_starts_total", worker=number) for number in "01"] == [2, 1]


def test_a_state_is_not_added_up() -> None:
    own = CollectorRegistry()
    enabled = Gauge("conductor_token_cache_enabled", "On.", ("model",), registry=own)
    enabled.labels("m").set(1)
    sums = SummedMetrics(own)
    sums.report(0, families_of(own))
    registry = CollectorRegistry()
    registry.register(sums)
    assert registry.get_sample_value("conductor_token_cache_enabled", {"model": "m"}) == 1
