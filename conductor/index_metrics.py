"""Prometheus metrics of the index, its streams and what is kept of them, read when they are scraped."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from cache_index import CacheIndex, Holder, StreamBooks, StreamStats
from conductor.index_snapshots import IndexSnapshots


class IndexCollector(Collector):
    """The index, the KV event streams that feed it, and the file it is saved to, if there is one."""

    def __init__(
        self, index: CacheIndex, events: StreamBooks, snapshots: IndexSnapshots | None = None
    ) -> None:
        self._index = index
        self._events = events
        self._snapshots = snapshots

    def collect(self) -> Iterator[Metric]:
        yield from self._streams()
        stats = self._index.stats()
        yield GaugeMetricFamily("conductor_index_blocks", "Distinct blocks in the cache index", stats.blocks)
        yield GaugeMetricFamily(
            "conductor_index_residencies", "Residencies in the cache index", stats.residencies
        )
        yield GaugeMetricFamily("conductor_index_bytes", "Memory of the cache index", stats.bytes)
        yield CounterMetricFamily(
            "conductor_index_dropped_residencies",
            "Residencies dropped because the index was full",
            stats.dropped_residencies,
        )
        if stats.max_blocks is not None:
            yield GaugeMetricFamily(
                "conductor_index_max_blocks", "Blocks that the index may hold", stats.max_blocks
            )
        if self._snapshots is not None:
            yield from _of_snapshots(self._snapshots)

    def _streams(self) -> Iterator[Metric]:
        labels = ["instance", "rank"]
        warm = GaugeMetricFamily("conductor_kv_stream_warm", "1 while nothing was missed", labels=labels)
        counters = {
            name: CounterMetricFamily(f"conductor_kv_{name}", text, labels=labels)
            for name, text in (
                ("batches", "KV event batches applied"),
                ("events", "KV events applied"),
                ("gaps", "Gaps in the sequence of batches"),
                ("replays", "Replays asked for"),
                ("malformed_frames", "Frames that could not be decoded"),
                ("unknown_events", "Events of an unknown type"),
                ("unresolved_blocks", "Blocks stored or removed that nobody can identify"),
                ("other_group_events", "KV events of cache groups that are not followed"),
            )
        }
        lag = GaugeMetricFamily(
            "conductor_kv_event_lag_seconds",
            "From the time in an engine's last batch to its being in the index",
            labels=labels,
        )
        by_holder: dict[Holder, list[StreamStats]] = {}
        for stream in self._events.stream_stats():
            by_holder.setdefault(stream.holder, []).append(stream)
        for holder, streams in by_holder.items():  # several may tell of one, each of its own tiers
            values = [holder.instance_id, str(holder.rank)]
            warm.add_metric(values, float(all(stream.state == "warm" for stream in streams)))
            lags = [stream.lag_s for stream in streams if stream.lag_s is not None]
            if lags:
                lag.add_metric(values, max(lags))
            for name, counter in counters.items():
                counter.add_metric(values, sum(getattr(stream, name) for stream in streams))
        yield warm
        yield lag
        yield from counters.values()


class RegistrationCollector(Collector):
    """Whether registrations would survive a restart."""

    def __init__(self, failures: Callable[[], int]) -> None:
        self._failures = failures

    def collect(self) -> Iterator[Metric]:
        text = "Times that registrations could not be saved"
        yield CounterMetricFamily("conductor_index_registration_failures", text, self._failures())


def _of_snapshots(snapshots: IndexSnapshots) -> Iterator[Metric]:
    name = "conductor_index_snapshot"
    yield CounterMetricFamily(f"{name}s", "Times that the index was saved", snapshots.saves)
    yield CounterMetricFamily(f"{name}_failures", "Times that saving the index failed", snapshots.failures)
    yield GaugeMetricFamily(f"{name}_bytes", "Size of the saved index", snapshots.file_bytes)
    yield GaugeMetricFamily(f"{name}_seconds", "How long saving took the last time", snapshots.took_s)
    yield GaugeMetricFamily(
        f"{name}_locked_seconds", "For how long of that nobody could use the index", snapshots.locked_s
    )
