"""Experiments of hit rates: one cache for a whole workload."""

from __future__ import annotations

from pathlib import Path

import pytest
from simulated_points import small_trace

from conductor.configuration_faults import ConfigError
from simulator.experiments.cache import cache_rows
from simulator.experiments.experiment_file import Experiment
from simulator.experiments.workload import Workload, read_records
from simulator.workloads import belady_hits, block_accesses, lru_hits, next_uses

EXPERIMENT = Experiment.model_validate(
    {
        "title": "A title",
        "question": "How large?",
        "source": "A paper",
        "workloads": {"recorded": {"trace": "small.jsonl"}, "drawn": {"generate": "rag", "requests": 80}},
        "caches": [
            {"workload": "recorded", "capacity_tokens": 40_000, "expected_percent": 12.5},
            {"workload": "drawn", "capacity_tokens": 100},
            {"workload": "recorded", "capacity_tokens": 512_000_000},
        ],
        "quick": {"workloads": {"calls": {"generate": "api", "requests": 50}}},
    }
)


def test_rows_have_the_hit_rates_of_their_workload(tmp_path: Path) -> None:
    path = small_trace(tmp_path)
    rows = list(cache_rows(EXPERIMENT, traces=tmp_path))
    assert [row.cache.workload for row in rows] == ["recorded", "recorded", "drawn"]
    accesses = block_accesses(read_records(Workload(path)))
    first, whole, tiny = (row.reuse for row in rows)
    assert first.lru_hit_rate * len(accesses) == pytest.approx(lru_hits(accesses, 40_000 // 512))
    best = belady_hits(accesses, 40_000 // 512, next_uses(accesses))
    assert first.belady_hit_rate * len(accesses) == pytest.approx(best)
    assert (
        whole.lru_hit_rate == whole.belady_hit_rate == pytest.approx(1 - len(set(accesses)) / len(accesses))
    )
    assert tiny.capacity_blocks == 1, "less than a block is one block"
    assert [row.cache.expected_percent for row in rows] == [12.5, None, None]


def test_a_quick_run_has_every_size_with_its_own_workload_and_no_figures_of_the_source() -> None:
    rows = list(cache_rows(EXPERIMENT, traces=None, quick=True))
    assert [(row.cache.workload, row.cache.capacity_tokens) for row in rows] == [
        ("calls", 100),
        ("calls", 40_000),
        ("calls", 512_000_000),
    ]
    assert all(row.cache.expected_percent is None for row in rows)


def test_fewer_requests_can_be_asked_for_and_a_missing_trace_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"small\.jsonl is not in"):
        list(cache_rows(EXPERIMENT, traces=tmp_path))
    small_trace(tmp_path)
    [whole, *_], [first, *_] = (
        [row.reuse for row in cache_rows(EXPERIMENT, traces=tmp_path, limit=limit)] for limit in (None, 1)
    )
    assert first.lru_hit_rate == 0 < whole.lru_hit_rate


def test_a_cache_needs_a_workload_of_the_experiment() -> None:
    content = EXPERIMENT.model_dump(mode="json", exclude_unset=True)
    content["caches"][0]["workload"] = "recoded"
    with pytest.raises(ValueError, match="unknown workload 'recoded' in caches; did you mean 'recorded'"):
        Experiment.model_validate(content)
    with pytest.raises(ValueError, match="or give caches, one of them"):
        Experiment.model_validate(content | {"clusters": {"one": {"cluster": "1"}}})
