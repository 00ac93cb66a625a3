"""Reading a trace of any known format, found out from what the file contains."""

from __future__ import annotations

import json
from collections.abc import Iterator
from enum import Enum
from itertools import islice
from pathlib import Path

from simulator.workloads.bailian import bailian_records
from simulator.workloads.conversations import conversation_records
from simulator.workloads.lines import Line, Warn, numbered_lines
from simulator.workloads.mooncake import aiperf_records, mooncake_records
from simulator.workloads.records import TraceError, TraceRecord
from simulator.workloads.tables import (
    AZURE_COLUMNS,
    BURSTGPT_COLUMNS,
    VIDUR_COLUMNS,
    azure_records,
    burstgpt_records,
)

_LINES_LOOKED_AT = 1000


class TraceFormat(Enum):
    MOONCAKE = "mooncake"
    AIPERF = "aiperf"  # mooncake_trace with sessions
    BAILIAN = "bailian"
    AZURE = "azure"
    BURSTGPT = "burstgpt"
    SHAREGPT = "sharegpt"

    @property
    def has_prefixes(self) -> bool:
        """Whether the format says which blocks requests share."""
        return self not in (TraceFormat.AZURE, TraceFormat.BURSTGPT)

    @property
    def has_arrivals(self) -> bool:
        return self is not TraceFormat.SHAREGPT


def detect_format(path: Path) -> TraceFormat:
    """The format of ``path`` by its first lines; `TraceError` when it is none of them."""
    with path.open("rb") as file:
        start = file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()
    if not start:
        raise TraceError(f"{path} is empty")
    if start.startswith(b"["):
        return TraceFormat.SHAREGPT
    if not start.startswith(b"{"):
        return _table_format(path, start)
    lines = list(islice(numbered_lines(path), _LINES_LOOKED_AT))
    objects = [fields for fields in map(_json_fields, lines) if fields]
    if not objects:
        raise TraceError(f"{path}, line 1: not valid JSON; name the format with --format")
    first = objects[0]
    if "chat_id" in first:
        return TraceFormat.BAILIAN
    if any("timestamp" not in fields or "hash_ids" not in fields for fields in objects):
        if any(fields.keys() & {"session_id", "delay", "text_input"} for fields in objects):
            return TraceFormat.AIPERF
        if not first.keys() & {"timestamp", "hash_ids", "input_length"}:
            raise TraceError(_unknown(path, f"the first line has the fields {', '.join(first) or 'none'}"))
    return TraceFormat.MOONCAKE


def _json_fields(line: Line) -> dict[str, object]:
    try:
        fields = json.loads(line.content)
    except ValueError:
        return {}
    return fields if isinstance(fields, dict) else {}


def _table_format(path: Path, start: bytes) -> TraceFormat:
    header = start.split(b"\n", 1)[0].decode("utf-8", "replace")
    columns = {column.strip().strip('"') for column in header.split(",")}
    if set(AZURE_COLUMNS) <= columns or set(VIDUR_COLUMNS) <= columns:
        return TraceFormat.AZURE
    if set(BURSTGPT_COLUMNS) <= columns:
        return TraceFormat.BURSTGPT
    raise TraceError(_unknown(path, f"the first line is {header.strip()[:80]!r}"))


def _unknown(path: Path, seen: str) -> str:
    known = ", ".join(each.value for each in TraceFormat)
    return f"{path}: no known format: {seen}; if it is one of {known}, name it with --format"


def read_trace(path: Path, warn: Warn, trace_format: TraceFormat | None = None) -> Iterator[TraceRecord]:
    """The records of ``path`` in the file's order, as they are asked for.

    Raises `TraceError` at the first bad line, naming file, line and field; a last line that was cut off is left
    out and reported to ``warn``.
    """
    chosen = trace_format or detect_format(path)
    if chosen is TraceFormat.SHAREGPT:
        return conversation_records(path)
    reader = {
        TraceFormat.MOONCAKE: mooncake_records,
        TraceFormat.AIPERF: aiperf_records,
        TraceFormat.BAILIAN: bailian_records,
        TraceFormat.AZURE: azure_records,
        TraceFormat.BURSTGPT: burstgpt_records,
    }[chosen]
    return reader(numbered_lines(path), warn)
