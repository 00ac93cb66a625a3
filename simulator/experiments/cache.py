"""Hit rates of single caches: experiments that need no cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from simulator.experiments.experiment_file import CacheSection, Experiment
from simulator.experiments.experiment_points import experiment_workloads
from simulator.experiments.workload import read_records
from simulator.workloads import CapacityReuse, capacity_reuse


@dataclass(frozen=True, slots=True)
class CacheRow:
    cache: CacheSection
    reuse: CapacityReuse


def cache_rows(
    experiment: Experiment,
    *,
    traces: Path | None,
    quick: bool = False,
    limit: int | None = None,
    warn: Callable[[str], None] = lambda text: None,
) -> Iterator[CacheRow]:
    """A row for each cache, workload by workload; arguments as those of `experiment_points`.

    In a quick run all caches are filled by the workloads that stand in for the experiment's, without figures of
    a source. Raises ConfigError, TraceError or OSError for a trace that cannot be used.
    """
    stand_in = quick and experiment.quick.workloads
    for name, workload in experiment_workloads(experiment, traces=traces, quick=quick, limit=limit).items():
        caches = [each for each in experiment.caches if stand_in or each.workload == name]
        if stand_in:
            sizes = sorted({each.capacity_tokens for each in caches})
            caches = [CacheSection(workload=name, capacity_tokens=size) for size in sizes]
        records = read_records(workload, warn)
        block_tokens = records[0].block_tokens
        reuse = capacity_reuse(records, [max(1, each.capacity_tokens // block_tokens) for each in caches])
        yield from map(CacheRow, caches, reuse)
