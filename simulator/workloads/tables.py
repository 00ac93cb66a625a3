"""Traces in CSV: arrivals and lengths, nothing about shared prefixes, so that every block is its own."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime

from simulator.workloads.fields import fault, text_count, text_number
from simulator.workloads.lines import Line, Warn, parsed_lines
from simulator.workloads.prefix_names import PrefixNames
from simulator.workloads.records import MOONCAKE_BLOCK_TOKENS, TraceError, TraceRecord, blocks_of

AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
VIDUR_COLUMNS = ("arrived_at", "num_prefill_tokens", "num_decode_tokens")
BURSTGPT_COLUMNS = ("Timestamp", "Request tokens", "Response tokens")

_Row = dict[str, str]


def azure_records(lines: Iterable[Line], warn: Warn) -> Iterator[TraceRecord]:
    """Azure's LLM inference traces (2023, 2024), and their form in Vidur (``arrived_at`` in seconds).

    Arrivals count from the first row.
    """
    place, header, rows = _header(lines)
    if set(VIDUR_COLUMNS) <= set(header):
        return _records(rows, place, header, VIDUR_COLUMNS, text_number, warn)
    return _records(rows, place, header, AZURE_COLUMNS, _date_s, warn)


def burstgpt_records(lines: Iterable[Line], warn: Warn) -> Iterator[TraceRecord]:
    """BurstGPT (``Timestamp`` in seconds). Rows without request tokens are requests that failed: left out.

    Where there is a ``Session ID`` (releases from 2.0 on), records carry it.
    """
    place, header, rows = _header(lines)
    return _records(rows, place, header, BURSTGPT_COLUMNS, text_number, warn)


def _header(lines: Iterable[Line]) -> tuple[str, list[str], Iterator[Line]]:
    rows = iter(lines)
    first = next(rows, None)
    if first is None:
        raise TraceError("the trace is empty: a table needs a first line with its columns' names")
    return first.place, _cells(first), rows


def _cells(line: Line) -> list[str]:
    return [cell.strip() for cell in next(csv.reader([line.content.decode("utf-8-sig", "replace")]))]


def _records(
    rows: Iterator[Line],
    place: str,
    header: list[str],
    columns: tuple[str, str, str],
    arrival_of: Callable[[str, _Row, str], float],
    warn: Warn,
) -> Iterator[TraceRecord]:
    missing = [column for column in columns if column not in header]
    if missing:
        raise TraceError(f"{place}: there is no column {missing[0]!r}; needed: {', '.join(columns)}")
    arrival, inputs, outputs = columns
    names = PrefixNames(MOONCAKE_BLOCK_TOKENS)
    first_s: float | None = None
    failed = 0

    def parse(line: Line) -> TraceRecord | None:
        nonlocal first_s, failed
        cells = _cells(line)
        if len(cells) != len(header):
            raise TraceError(f"{line.place}: {len(cells)} columns, the first line has {len(header)}")
        row = dict(zip(header, cells, strict=True))
        at_s = arrival_of(line.place, row, arrival)
        input_tokens = text_count(line.place, row, inputs)
        output_tokens = text_count(line.place, row, outputs)
        if first_s is None:
            first_s = at_s
        if input_tokens == 0:
            failed += 1
            return None
        hash_ids = names.unshared(blocks_of(input_tokens, MOONCAKE_BLOCK_TOKENS))
        session_id = row.get("Session ID") or None
        return TraceRecord(max(0.0, at_s - first_s), input_tokens, output_tokens, hash_ids, session_id)

    for record in parsed_lines(rows, parse, warn):
        if record is not None:
            yield record
    if failed:
        warn(f"{failed} rows without input tokens (failed requests) are left out")


def _date_s(place: str, row: _Row, name: str) -> float:
    try:
        return datetime.fromisoformat(row[name].strip()).timestamp()
    except ValueError:
        raise fault(place, row, name, "a date such as 2023-11-16 18:15:46.6805900") from None
