"""What a simulated cluster is asked to do: the requests of a trace."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain, islice
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from simulator.workloads import MOONCAKE_BLOCK_TOKENS, TraceRecord

Hashes = NDArray[np.uint64]

BLOCK_TOKENS: Final = MOONCAKE_BLOCK_TOKENS
_TOGETHER: Final = (
    1_024  # records: for the few blocks of one prompt, calls into NumPy take ten times the arithmetic
)
_STEP: Final = np.uint64(0x9E3779B97F4A7C15)
_ROUNDS: Final = (
    (np.uint64(30), np.uint64(0xBF58476D1CE4E5B9)),
    (np.uint64(27), np.uint64(0x94D049BB133111EB)),
)
_LAST_SHIFT: Final = np.uint64(31)


class Request(msgspec.Struct, frozen=True, eq=False, gc=False):
    """``hashes`` name the prompt's full blocks (see `block_tokens_of`), each with all that is before it."""

    number: int
    arrival_s: float
    prompt_tokens: int
    output_tokens: int  # at least 1
    hashes: Hashes


def requests_of(records: Iterable[TraceRecord], speed: float = 1.0) -> Iterator[Request]:
    """The requests of a trace, ``speed`` times faster than recorded, from time 0 on.

    A block that is not full cannot be reused and has no hash; an answer has at least one token. Raises
    ValueError where arrivals go backwards or the size of blocks changes.
    """
    first_s = last_s = None
    block_tokens = number = 0
    records = iter(records)
    while together := list(islice(records, _TOGETHER)):
        prompts: list[tuple[int, ...]] = []
        for place, record in enumerate(together, start=number):
            arrival_s = record.arrival_s
            if last_s is not None and arrival_s < last_s:
                raise ValueError(
                    f"request {place} arrives at {arrival_s} s, before the one before it ({last_s} s); "
                    "sort the trace by timestamp"
                )
            last_s = arrival_s
            if record.block_tokens != block_tokens:
                block_tokens = _same_blocks(place, record, block_tokens)
            prompts.append(record.hash_ids[: record.input_tokens // block_tokens])
        first_s = together[0].arrival_s if first_s is None else first_s
        hashes = _mixed(np.fromiter(chain.from_iterable(prompts), np.uint64))
        start = 0
        for record, prompt in zip(together, prompts, strict=True):
            stop = start + len(prompt)
            yield Request(
                number,
                (record.arrival_s - first_s) / speed,
                record.input_tokens,
                record.output_tokens or 1,
                hashes[start:stop],
            )
            start = stop
            number += 1


def block_tokens_of(records: Iterable[TraceRecord]) -> int:
    """Tokens in each block of a trace. Raises ValueError where they are not the same in all requests."""
    block_tokens = 0
    for number, record in enumerate(records):
        block_tokens = _same_blocks(number, record, block_tokens)
    return block_tokens or BLOCK_TOKENS


def _same_blocks(number: int, record: TraceRecord, block_tokens: int) -> int:
    if block_tokens and record.block_tokens != block_tokens:
        raise ValueError(
            f"request {number} has blocks of {record.block_tokens} tokens, those before it of {block_tokens}; "
            "a cache has blocks of one size (conductor trace convert makes them so)"
        )
    return record.block_tokens


def _mixed(ids: Hashes) -> Hashes:
    """Ids that count up, spread over 64 bits as hashes are (the finalizer of splitmix64, Steele et al. 2014)."""
    words = ids + _STEP
    for shift, factor in _ROUNDS:
        words ^= words >> shift
        words *= factor
    words ^= words >> _LAST_SHIFT
    return words
