"""What distinguishes one use of a block from another: the request's, and the block's place in its prompt.

Each use has a cell of statistics at every level of detail. Cells are found by hashing what they stand for, so that
memory is bounded; where two fall together they share their statistics.
"""

# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from typing import Final

import numpy as np

from cache_index.kernel_set import outlined
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


@outlined
def halvings(number):
    """The logarithm to base 2, rounded down; 0 of what is less than 2."""
    count = 0
    while number > 1:
        number >>= 1
        count += 1
    return count


@outlined
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


@outlined
def cell(level, key):
    """The row of what ``key`` stands for at a level."""
    word = (np.uint64(key) * np.uint64(8) + np.uint64(level)) * np.uint64(0x9E3779B97F4A7C15)
    word ^= word >> np.uint64(29)
    word *= np.uint64(0xBF58476D1CE4E5B9)
    return np.int64((word >> np.uint64(32)) & np.uint64(CELLS - 1))


@outlined
def write_cells(record, kind, part, turn, progress, fresh, blocks, gap_s):
    """Fill a record's cells, from coarse to fine."""
    turns = turn if turn <= 4 else 5 if turn <= 6 else 6 if turn <= 9 else 7
    by_turn = (part * 8 + turns) * 4 + progress
    by_size = by_turn * 16 + min(halvings(fresh), 15)
    record[R_CELLS] = cell(0, part)
    record[R_CELLS + 1] = cell(1, by_turn)
    record[R_CELLS + 2] = cell(2, by_size)
    record[R_CELLS + 3] = cell(3, np.int64(kind) * np.int64(1 << 32) + by_size)
