"""Request traces: when requests arrive, how long they are, and which prefixes they share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import numpy as np
import orjson
from numpy.typing import NDArray

MOONCAKE_BLOCK_TOKENS: Final = 512


class TraceError(ValueError):
    """A trace file is broken; the text names file, line and field."""


@dataclass(frozen=True, slots=True)
class TraceRecord:
    """One request. ``hash_ids[i]`` names the prefix up to and including block ``i``."""

    arrival_s: float
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...]


def read_mooncake(path: Path) -> Iterator[TraceRecord]:
    """The records of a Mooncake JSONL trace, read as they are asked for; `TraceError` at the first bad line.

    Fields: ``timestamp`` (ms), ``input_length``, ``output_length``, ``hash_ids`` (one per 512 tokens).
    Empty lines are skipped.
    """
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.isspace():
                yield _record(line, f"{path}, line {number}")


def _record(line: bytes, place: str) -> TraceRecord:
    try:
        fields = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise TraceError(f"{place}: not valid JSON, perhaps cut off: {error}") from None
    if not isinstance(fields, dict):
        raise TraceError(f"{place}: not a JSON object")
    timestamp = fields.get("timestamp")
    if isinstance(timestamp, bool) or not isinstance(timestamp, int | float) or timestamp < 0:
        raise _fault(place, fields, "timestamp", "a number of milliseconds from 0")
    input_tokens = _count(place, fields, "input_length", minimum=1)
    output_tokens = _count(place, fields, "output_length", minimum=0)
    hash_ids = fields.get("hash_ids")
    if not isinstance(hash_ids, list) or not all(type(each) is int and each >= 0 for each in hash_ids):
        raise _fault(place, fields, "hash_ids", "a list of integers from 0")
    blocks = -(-input_tokens // MOONCAKE_BLOCK_TOKENS)
    if len(hash_ids) != blocks:
        raise TraceError(
            f"{place}: field 'hash_ids' has {len(hash_ids)} entries, input_length {input_tokens} needs {blocks}"
        )
    return TraceRecord(timestamp / 1000, input_tokens, output_tokens, tuple(hash_ids))


def _count(place: str, fields: dict[str, Any], name: str, *, minimum: int) -> int:
    value = fields.get(name)
    if type(value) is not int or value < minimum:
        raise _fault(place, fields, name, f"an integer from {minimum}")
    return value


def _fault(place: str, fields: dict[str, Any], name: str, wanted: str) -> TraceError:
    if name not in fields:
        return TraceError(f"{place}: field {name!r} is missing")
    shown = repr(fields[name])
    shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
    return TraceError(f"{place}: field {name!r} is {shown}, not {wanted}")


def prompt_tokens(
    record: TraceRecord, *, first_token: int = 3, last_token: int = 4098, seed: int = 0
) -> NDArray[np.uint32]:
    """Token ids for a record: 512 per hash id, cut to the record's input length.

    The ids lie in ``first_token`` to ``last_token`` (inclusive; the default range is that of the emulated
    engine's tokenizer without its special tokens) and depend on hash id and ``seed`` only, so that records
    with a common prefix of hash ids have a common prefix of tokens, and no longer one except by chance.
    """
    blocks = [_block(hash_id, first_token, last_token, seed) for hash_id in record.hash_ids]
    return np.concatenate(blocks)[: record.input_tokens]


@lru_cache(maxsize=1 << 14)
def _block(hash_id: int, first_token: int, last_token: int, seed: int) -> NDArray[np.uint32]:
    source = np.random.Generator(np.random.PCG64((seed, hash_id)))
    block = source.integers(first_token, last_token, MOONCAKE_BLOCK_TOKENS, dtype=np.uint32, endpoint=True)
    block.setflags(write=False)
    return block
