"""Parts of a trace, and the same trace faster, slower or in other blocks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
from msgspec.structs import replace

from simulator.workloads.prefix_names import PrefixNames
from simulator.workloads.records import TraceRecord


@dataclass(frozen=True, slots=True)
class Selection:
    """Which requests to keep; bounds are inclusive, but for ``end_s``, and None is no bound."""

    start_s: float = 0.0
    end_s: float | None = None
    min_input_tokens: int = 0
    max_input_tokens: int | None = None
    min_output_tokens: int = 0
    max_output_tokens: int | None = None
    limit: int | None = None  # of those that pass the rest


def select(records: Iterable[TraceRecord], selection: Selection) -> Iterator[TraceRecord]:
    """The records that pass, moved so that ``start_s`` becomes 0."""
    kept = (record for record in records if _passes(record, selection))
    for record in islice(kept, selection.limit):
        yield replace(record, arrival_s=record.arrival_s - selection.start_s) if selection.start_s else record


def _passes(record: TraceRecord, selection: Selection) -> bool:
    end_s = math.inf if selection.end_s is None else selection.end_s
    longest_input = math.inf if selection.max_input_tokens is None else selection.max_input_tokens
    longest_output = math.inf if selection.max_output_tokens is None else selection.max_output_tokens
    return (
        selection.start_s <= record.arrival_s < end_s
        and selection.min_input_tokens <= record.input_tokens <= longest_input
        and selection.min_output_tokens <= record.output_tokens <= longest_output
    )


def faster(records: Iterable[TraceRecord], factor: float) -> Iterator[TraceRecord]:
    """All times, delays within sessions included, divided by ``factor``."""
    if not 0 < factor < math.inf:
        raise ValueError(f"factor must be positive, not {factor}")
    if factor == 1:
        yield from records
        return
    for record in records:
        delay_s = None if record.delay_s is None else record.delay_s / factor
        yield replace(record, arrival_s=record.arrival_s / factor, delay_s=delay_s)


def at_rate(records: Sequence[TraceRecord], requests_per_s: float, seed: int = 0) -> list[TraceRecord]:
    """The trace scaled in time to a mean rate; one without arrival times gets Poisson arrivals in its order."""
    if not 0 < requests_per_s < math.inf:
        raise ValueError(f"requests_per_s must be positive, not {requests_per_s}")
    span_s = trace_span_s(records)
    if span_s > 0:
        return list(faster(records, requests_per_s * span_s / len(records)))
    gaps_s = np.random.Generator(np.random.PCG64(seed)).exponential(1 / requests_per_s, len(records))
    arrivals_s = np.cumsum(gaps_s) - (gaps_s[0] if len(gaps_s) else 0.0)
    return [replace(record, arrival_s=float(at)) for record, at in zip(records, arrivals_s, strict=True)]


def trace_span_s(records: Sequence[TraceRecord]) -> float:
    """Seconds from the first arrival to the last; 0 without records."""
    arrivals = [record.arrival_s for record in records]
    return max(arrivals) - min(arrivals) if arrivals else 0.0


def in_blocks_of(records: Iterable[TraceRecord], block_tokens: int) -> Iterator[TraceRecord]:
    """The same requests with larger blocks, whose ids are new.

    Raises ValueError where ``block_tokens`` is not a multiple of a record's block: a block cannot be divided.
    """
    names = PrefixNames(block_tokens)
    for record in records:
        merged, rest = divmod(block_tokens, record.block_tokens)
        if rest:
            raise ValueError(f"blocks of {record.block_tokens} tokens do not make blocks of {block_tokens}")
        parent, ids = -1, []
        for start in range(0, len(record.hash_ids), merged):
            members = tuple((hash_id, 0, 0) for hash_id in record.hash_ids[start : start + merged])
            parent = names.name(parent, members)
            ids.append(parent)
        yield replace(record, hash_ids=tuple(ids), block_tokens=block_tokens)
