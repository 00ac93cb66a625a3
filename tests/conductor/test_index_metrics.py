"""What the index and its streams report to Prometheus."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from cache_index import CacheIndex, Holder, StreamStats, Tier
from cache_index.hashing import Namespace, sequence_hashes
from conductor.index_metrics import IndexCollector

STATS = StreamStats(
    holder=Holder("engine", 1),
    state="warm",
    last_seq=9,
    batches=10,
    events=20,
    gaps=1,
    replays=2,
    malformed_frames=0,
    malformed_events=0,
    unknown_events=0,
    unresolved_blocks=3,
    last_event_at_s=None,
    other_group_events=4,
)


class Books:
    """Two streams that tell of one holder, each of its own tiers."""

    def stream_stats(self) -> list[StreamStats]:
        return [STATS, replace(STATS, state="cold", batches=5)]


def samples(collector: IndexCollector) -> dict[tuple[str, str], float]:
    registry = CollectorRegistry()
    registry.register(collector)
    found: dict[tuple[str, str], float] = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        for sample in family.samples:
            key = sample.name, sample.labels.get("instance", "")
            assert key not in found, f"{key} twice"
            found[key] = sample.value
    return found


def test_streams_of_one_holder_are_one_row() -> None:
    found = samples(IndexCollector(CacheIndex(), Books()))
    assert found["conductor_kv_stream_warm", "engine"] == 0
    assert found["conductor_kv_batches_total", "engine"] == 15
    assert found["conductor_kv_unresolved_blocks_total", "engine"] == 6
    assert found["conductor_kv_other_group_events_total", "engine"] == 8


def test_the_lag_is_that_of_the_stream_that_is_last() -> None:
    class Late(Books):
        def stream_stats(self) -> list[StreamStats]:
            return [replace(STATS, lag_s=0.25), replace(STATS, lag_s=1.5), STATS]

    assert samples(IndexCollector(CacheIndex(), Late()))["conductor_kv_event_lag_seconds", "engine"] == 1.5
    unknown = samples(IndexCollector(CacheIndex(), Books()))
    assert ("conductor_kv_event_lag_seconds", "engine") not in unknown


def test_the_bound_of_the_index_and_what_it_cost() -> None:
    index = CacheIndex(max_blocks=100)
    index.register(Holder("a"))
    tokens = np.arange(16 * 300, dtype=np.uint32)
    index.store(Holder("a"), Tier.DEVICE, Namespace("m", 16), sequence_hashes(tokens, 16))
    found = samples(IndexCollector(index, Books()))
    assert found["conductor_index_max_blocks", ""] == 100
    assert found["conductor_index_blocks", ""] <= 100
    assert found["conductor_index_dropped_residencies_total", ""] >= 200
    unbounded = samples(IndexCollector(CacheIndex(), Books()))
    assert ("conductor_index_max_blocks", "") not in unbounded
    assert ("conductor_index_snapshots_total", "") not in unbounded
