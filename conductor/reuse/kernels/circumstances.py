"""What distinguishes one use of a block from another: the request's, and the block's place in its prompt.

Each use has a cell of statistics at every level of detail. Cells are found by hashing what they stand for, so that
memory is bounded; where two fall together they share their statistics.
"""

# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from typing import Final

import numpy as np

from cache_index.kernel_set import inlined
from conductor.reuse.kernels.layout import CELLS, R_CELLS

# Parts of a prompt, from its end to its beginning. Known blocks are told apart by how often they have been used:
# KNOWN + 1 to KNOWN + 7.
RETURN: Final = 0  # no blocks: whether the conversation goes on
LAST: Final = 1  # mostly cut by the prompt's end, and then not part of a longer one
BEFORE_LAST: Final = 2
FRESH: Final = 3  # not known
FIRST_FRESH: Final = 4
KNOWN: Final = 4
BEGINNING: Final = 12  # above all parts

_FIRST_BLOCKS: Final = 2
_SIZES_TOKENS: Final = (2_048, 4_096, 8_192, 32_768)

# How a request goes on with what was known.
NEW: Final = 0  # not at all, or with what many begin with
WHOLE: Final = 1  # with an earlier prompt, whole but for its last two blocks
PARTLY: Final = 2  # with a beginning of an earlier prompt that reaches into what that prompt had brought
BESIDE: Final = 3  # with the same beginning as an earlier turn


@inlined
def size_of(fresh_tokens):
    """The class of how much a prompt adds to what was known: questions, answers with them, documents."""
    size = 0
    while size < 4 and fresh_tokens >= _SIZES_TOKENS[size]:
        size += 1
    return size


@inlined
def part_of(position, matched, blocks, uses):
    """The part of a prompt that a block belongs to; ``uses`` are those before this one."""
    if position == blocks - 1:
        return LAST
    if position == blocks - 2:
        return BEFORE_LAST
    if position >= matched:
        return FIRST_FRESH if position < matched + _FIRST_BLOCKS else FRESH
    if uses <= 3:
        return KNOWN + max(uses, 1)
    return KNOWN + (4 if uses <= 5 else 5 if uses <= 8 else 6 if uses <= 32 else 7)


@inlined
def cell(level, key):
    """The row of what ``key`` stands for at a level."""
    word = (np.uint64(key) * np.uint64(8) + np.uint64(level)) * np.uint64(0x9E3779B97F4A7C15)
    word ^= word >> np.uint64(29)
    word *= np.uint64(0xBF58476D1CE4E5B9)
    return np.int64((word >> np.uint64(32)) & np.uint64(CELLS - 1))


@inlined
def write_cells(record, kind, part, turn, progress, fresh_tokens):
    """Fill a record's cells, from coarse to fine."""
    turns = min(turn, 3 if part != RETURN else 10)
    key = np.int64(part)
    record[R_CELLS] = cell(0, key)
    key = key * 8 + size_of(fresh_tokens)
    record[R_CELLS + 1] = cell(1, key)
    key = key * 16 + turns
    record[R_CELLS + 2] = cell(2, key)
    key = key * 4 + progress
    record[R_CELLS + 3] = cell(3, key)
    record[R_CELLS + 4] = cell(4, key * (1 << 32) + kind)
