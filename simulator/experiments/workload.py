"""What is simulated: a trace file or a generated workload, in part, and how fast it comes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Final

from msgspec.structs import replace

from simulator.cluster import Request, block_tokens_of, requests_of
from simulator.workloads import (
    Selection,
    TraceError,
    TraceFormat,
    TraceRecord,
    at_rate,
    generate,
    read_trace,
    select,
    trace_span_s,
)

_WHOLE: Final = Selection()


@dataclass(frozen=True, slots=True)
class Generated:
    """The arguments of `simulator.workloads.generate`."""

    kind: str
    requests: int
    requests_per_s: float
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Workload:
    """A trace file or a generated workload, and what is taken of it."""

    source: Path | Generated
    trace_format: TraceFormat | None = None  # None: by content
    selection: Selection = _WHOLE
    output_tokens: int | None = None  # of every answer, instead of its own

    @property
    def name(self) -> str:
        return self.source.stem if isinstance(self.source, Path) else self.source.kind


@dataclass(frozen=True, slots=True)
class Load:
    """Arrivals ``speed`` times as fast as recorded, or at ``rate`` requests a second; without either as recorded.

    ``seed`` is for arrivals that are drawn, of traces that have none.
    """

    speed: float | None = None
    rate: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.speed is not None and self.rate is not None:
            raise ValueError("speed and rate both scale time: give one of them")
        for name, value in (("speed", self.speed), ("rate", self.rate)):
            if value is not None and not 0 < value < float("inf"):
                raise ValueError(f"{name} must be positive, not {value}")

    def __str__(self) -> str:
        return f"{self.rate:g}/s" if self.rate is not None else f"x{self.speed or 1:g}"


@dataclass(frozen=True, slots=True)
class Requests:
    """The requests of a simulation, in blocks of ``block_tokens``."""

    requests: list[Request]
    block_tokens: int


def read_records(workload: Workload, warn: Callable[[str], None] = lambda text: None) -> list[TraceRecord]:
    """Its requests in order of arrival. Raises TraceError or OSError for a file that cannot be used.

    ``warn`` is told of what is left out.
    """
    if isinstance(workload.source, Generated):
        source = workload.source
        read = iter(generate(source.kind, source.requests, source.requests_per_s, source.seed))
    else:
        read = read_trace(workload.source, warn, workload.trace_format)
    records = sorted(select(read, workload.selection), key=lambda record: record.arrival_s)
    if not records:
        raise TraceError(f"{workload.source} has no request, or none is left: loosen the filters")
    if workload.output_tokens is not None:
        records = [replace(record, output_tokens=workload.output_tokens) for record in records]
    return records


@lru_cache(maxsize=8)
def records_once(workload: Workload) -> tuple[TraceRecord, ...]:
    """As `read_records`, read once in this process."""
    return tuple(read_records(workload))


def requests_at(records: Sequence[TraceRecord], load: Load) -> Requests:
    """The requests as they come. Raises ValueError for blocks of several sizes."""
    block_tokens = block_tokens_of(records)
    if load.rate is not None:
        return Requests(list(requests_of(at_rate(records, load.rate, load.seed))), block_tokens)
    return Requests(list(requests_of(records, load.speed or 1.0)), block_tokens)


def recorded_rate(records: Sequence[TraceRecord]) -> float:
    """Requests a second as recorded; 1 for a trace without arrival times."""
    span_s = trace_span_s(records)
    return len(records) / span_s if span_s else 1.0


@lru_cache(maxsize=64)
def file_digest(path: Path) -> str:
    """SHA-256 of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
