"""One request of a workload, and the tokens that stand for it."""

from __future__ import annotations

from functools import lru_cache
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

MOONCAKE_BLOCK_TOKENS: Final = 512


class TraceError(ValueError):
    """A trace file is broken; the text names file, line and field."""


class TraceRecord(msgspec.Struct, frozen=True, gc=False):
    """One request. ``hash_ids[i]`` names the prefix up to and including block ``i``.

    ``input_tokens`` is the whole prompt, a session's earlier turns included. ``delay_s`` is what a session's
    user or tool took between the end of the answer before and this request; None for first turns, and where
    the trace does not say.
    """

    arrival_s: float
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...]
    session_id: str | None = None
    delay_s: float | None = None
    block_tokens: int = MOONCAKE_BLOCK_TOKENS


def blocks_of(tokens: int, block_tokens: int) -> int:
    """Blocks that ``tokens`` tokens fill or begin."""
    return -(-tokens // block_tokens)


def prompt_tokens(
    record: TraceRecord, *, first_token: int = 3, last_token: int = 4098, seed: int = 0
) -> NDArray[np.uint32]:
    """Token ids for a record: ``record.block_tokens`` per hash id, cut to the record's input length.

    The ids lie in ``first_token`` to ``last_token`` (inclusive; the default range is that of the emulated
    engine's tokenizer without its special tokens) and depend on hash id and ``seed`` only, so that records
    with a common prefix of hash ids have a common prefix of tokens, and no longer one except by chance.
    """
    blocks = [
        _block(hash_id, first_token, last_token, seed, record.block_tokens) for hash_id in record.hash_ids
    ]
    return np.concatenate(blocks)[: record.input_tokens]


@lru_cache(maxsize=1 << 14)
def _block(hash_id: int, first_token: int, last_token: int, seed: int, tokens: int) -> NDArray[np.uint32]:
    source = np.random.Generator(np.random.PCG64((seed, hash_id)))
    block = source.integers(first_token, last_token, tokens, dtype=np.uint32, endpoint=True)
    block.setflags(write=False)
    return block
