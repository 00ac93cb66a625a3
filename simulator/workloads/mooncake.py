"""Mooncake's JSONL, as published with FAST'25, and AIPerf's ``mooncake_trace``, which adds sessions to it.

In Mooncake's files every line has the whole context of its request. In AIPerf's (0.13, "conversation context
mode") the lines of a session hold what a turn adds: what went before, the answer included, is put in front of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import count
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
import orjson

from simulator.workloads.fields import count_field, fault, hash_ids_field, json_object, time_field
from simulator.workloads.lines import Line, Warn, numbered_lines, parsed_lines
from simulator.workloads.prefix_names import Context, PrefixNames
from simulator.workloads.records import MOONCAKE_BLOCK_TOKENS, TraceError, TraceRecord, blocks_of
from simulator.workloads.text import append_text

# What AIPerf leaves to the run and a trace has to assume: when an answer has ended, so that the next turn follows.
ASSUMED_FIRST_TOKEN_S: Final = 1.0
ASSUMED_TOKEN_S: Final = 0.03


def assumed_answer_s(output_tokens: int) -> float:
    """Seconds from a request's arrival to its answer's end, where only a run would tell."""
    return ASSUMED_FIRST_TOKEN_S + ASSUMED_TOKEN_S * output_tokens


def read_mooncake(path: Path) -> Iterator[TraceRecord]:
    """The records of a Mooncake JSONL trace, read as they are asked for; `TraceError` at the first bad line.

    Fields: ``timestamp`` (ms), ``input_length``, ``output_length``, ``hash_ids`` (one per 512 tokens); where
    present, ``session_id`` and ``delay`` (ms). Empty lines are skipped.
    """
    for line in numbered_lines(path):
        yield _whole_context(line)


def mooncake_records(lines: Iterable[Line], warn: Warn) -> Iterator[TraceRecord]:
    """As `read_mooncake`, without a last line that was cut off."""
    return parsed_lines(lines, _whole_context, warn)


_Number = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_Time = _Number | Annotated[float, msgspec.Meta(ge=0)]


class _Fields(msgspec.Struct, gc=False):
    """A line that is as it should be: decoded into this, it is checked as well, in half of the time."""

    timestamp: _Time
    input_length: Annotated[int, msgspec.Meta(ge=1)]
    output_length: _Number
    hash_ids: tuple[_Number, ...]
    session_id: str | int | None = None
    delay: _Time | None = None


_decode: Final = msgspec.json.Decoder(_Fields).decode


def _whole_context(line: Line) -> TraceRecord:
    try:
        fields = _decode(line.content)
    except msgspec.MsgspecError:
        return _checked(line)
    session_id, delay, input_tokens = fields.session_id, fields.delay, fields.input_length
    if len(fields.hash_ids) != -(-input_tokens // MOONCAKE_BLOCK_TOKENS):
        return _checked(line)
    return TraceRecord(
        fields.timestamp / 1000,
        input_tokens,
        fields.output_length,
        fields.hash_ids,
        None if session_id is None else str(session_id),
        None if delay is None else delay / 1000,
    )


def _checked(line: Line) -> TraceRecord:
    """The record of a line field by field, or what is wrong with it."""
    place = line.place
    fields = json_object(line.content, place)
    arrival_s = time_field(place, fields, "timestamp", "milliseconds") / 1000
    input_tokens = count_field(place, fields, "input_length", minimum=1)
    output_tokens = count_field(place, fields, "output_length", minimum=0)
    hash_ids = hash_ids_field(place, fields)
    _check_blocks(place, hash_ids, input_tokens)
    session_id, delay_s = _session(place, fields)
    return TraceRecord(arrival_s, input_tokens, output_tokens, hash_ids, session_id, delay_s)


def _check_blocks(place: str, hash_ids: tuple[int, ...], input_tokens: int) -> None:
    blocks = blocks_of(input_tokens, MOONCAKE_BLOCK_TOKENS)
    if len(hash_ids) != blocks:
        raise TraceError(
            f"{place}: field 'hash_ids' has {len(hash_ids)} entries, input_length {input_tokens} needs {blocks}"
        )


def _session(place: str, fields: dict[str, Any]) -> tuple[str | None, float | None]:
    session_id = fields.get("session_id")
    if session_id is not None and (isinstance(session_id, bool) or not isinstance(session_id, str | int)):
        raise fault(place, fields, "session_id", "a string or an integer")
    delay_s = None
    if fields.get("delay") is not None:
        delay_s = time_field(place, fields, "delay", "milliseconds") / 1000
    return (None if session_id is None else str(session_id)), delay_s


class _Session:
    def __init__(self, names: PrefixNames) -> None:
        self.context = Context(names)
        self.answer_end_s = 0.0
        self.turns = 0


def aiperf_records(lines: Iterable[Line], warn: Warn) -> Iterator[TraceRecord]:
    """Records of a ``mooncake_trace`` file, each with its session's whole context before it.

    The first turn of a session needs ``timestamp`` (0 without one), later ones ``timestamp`` or ``delay``; with
    ``delay`` alone a turn arrives that long after the answer before it ended, at `assumed_answer_s`. A line has
    ``input_length`` (and ``hash_ids``, else nothing of it is shared), or ``text_input``, whose tokens are
    estimated. Records come in the file's order.
    """
    names = PrefixNames(MOONCAKE_BLOCK_TOKENS)
    sessions: dict[str, _Session] = {}
    numbers = count()

    def parse(line: Line) -> TraceRecord:
        place = line.place
        fields = json_object(line.content, place)
        session_id, delay_s = _session(place, fields)
        output_tokens = 0
        if fields.get("output_length") is not None:
            output_tokens = count_field(place, fields, "output_length", minimum=0)
        timestamp_s = None
        if fields.get("timestamp") is not None:
            timestamp_s = time_field(place, fields, "timestamp", "milliseconds") / 1000
        number = next(numbers)
        name = session_id if session_id is not None else f"line {number}"
        session = sessions.get(name) or _Session(names)
        _append_turn(session.context, place, fields, number)
        if session.turns and timestamp_s is None and delay_s is None:
            raise TraceError(f"{place}: a later turn of session {name!r} needs 'delay' or 'timestamp'")
        arrival_s = timestamp_s if timestamp_s is not None else session.answer_end_s + (delay_s or 0.0)
        record = TraceRecord(
            *(arrival_s, session.context.tokens, output_tokens, session.context.hash_ids(), session_id),
            delay_s=delay_s if session.turns else None,
        )
        session.context.append(("answer", number), output_tokens)
        session.answer_end_s = arrival_s + assumed_answer_s(output_tokens)
        session.turns += 1
        if session_id is not None:
            sessions[name] = session
        return record

    return parsed_lines(lines, parse, warn)


def _append_turn(context: Context, place: str, fields: dict[str, Any], number: int) -> None:
    text = fields.get("text_input")
    if isinstance(text, str) and text:
        append_text(context, text)
        return
    if "text_input" in fields:
        raise fault(place, fields, "text_input", "a text that is not empty")
    if "input_length" not in fields and ("messages" in fields or "payload" in fields):
        raise TraceError(
            f"{place}: 'messages' and 'payload' are not read; give 'input_length' and 'hash_ids'"
        )
    tokens = count_field(place, fields, "input_length", minimum=1)
    if fields.get("hash_ids") is None:
        context.append(("line", number), tokens)
        return
    hash_ids = hash_ids_field(place, fields)
    _check_blocks(place, hash_ids, tokens)
    for index, hash_id in enumerate(hash_ids):
        context.append(("block", hash_id), min(MOONCAKE_BLOCK_TOKENS, tokens - index * MOONCAKE_BLOCK_TOKENS))


def mooncake_line(record: TraceRecord) -> bytes:
    """A record as a line of Mooncake's JSONL with its newline, ``session_id`` and ``delay`` where it has them.

    Raises ValueError for records whose blocks are not of 512 tokens.
    """
    if record.block_tokens != MOONCAKE_BLOCK_TOKENS:
        raise ValueError(
            f"Mooncake's blocks have {MOONCAKE_BLOCK_TOKENS} tokens, this trace's {record.block_tokens}: merge them"
        )
    fields: dict[str, Any] = {
        "timestamp": round(record.arrival_s * 1000),
        "input_length": record.input_tokens,
        "output_length": record.output_tokens,
        "hash_ids": record.hash_ids,
    }
    if record.session_id is not None:
        fields["session_id"] = record.session_id
    if record.delay_s is not None:
        fields["delay"] = round(record.delay_s * 1000)
    return orjson.dumps(fields, option=orjson.OPT_APPEND_NEWLINE)
