"""Known blocks: an open-addressing table from a block's hash to its last access, and forgetting the oldest."""

# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

import numpy as np

from cache_index.kernel_set import inlined
from conductor.reuse.kernels.layout import (
    C_BLOCKS,
    C_NEXT_ACCESS,
    C_NEXT_RECORD,
    C_OLDEST_ACCESS,
    C_OLDEST_RECORD,
    R_UNUSED,
)

NONE = -1


@inlined
def home(history, block_hash):
    """Where the search for a block begins."""
    word = block_hash * np.uint64(0x9E3779B97F4A7C15)
    word ^= word >> np.uint64(32)
    return np.int64(word & np.uint64(history.table.shape[0] - 1))


@inlined
def find(history, block_hash):
    """The place in the table of a block, or the empty one where it would stand."""
    mask = history.table.shape[0] - 1
    at = home(history, block_hash)
    while True:
        access = history.table[at]
        if access == NONE or history.access_hash[access & (history.access_hash.shape[0] - 1)] == block_hash:
            return at
        at = (at + 1) & mask


@inlined
def last_access(history, block_hash):
    """The number of a block's last access, NONE if it is not known."""
    return history.table[find(history, block_hash)]


@inlined
def erase(history, at):
    """Empty a place of the table; what stands behind it moves up."""
    mask = history.table.shape[0] - 1
    hole = at
    at = (at + 1) & mask
    while history.table[at] != NONE:
        access = history.table[at]
        wanted = home(history, history.access_hash[access & (history.access_hash.shape[0] - 1)])
        if ((at - wanted) & mask) >= ((at - hole) & mask):
            history.table[hole] = access
            hole = at
        at = (at + 1) & mask
    history.table[hole] = NONE


@inlined
def enter_accesses(history):
    """Fill an empty table with the accesses there are; returns the blocks that they are of."""
    counters = history.counters
    blocks = np.int64(0)
    for access in range(counters[C_OLDEST_ACCESS], counters[C_NEXT_ACCESS]):
        at = find(history, history.access_hash[access & (history.access_hash.shape[0] - 1)])
        blocks += history.table[at] == NONE
        history.table[at] = access
    return blocks


@inlined
def forget_access(history):
    """Forget the oldest access, and its block if it was not used since."""
    counters = history.counters
    access = counters[C_OLDEST_ACCESS]
    at = find(history, history.access_hash[access & (history.access_hash.shape[0] - 1)])
    if history.table[at] == access:
        erase(history, at)
        counters[C_BLOCKS] -= 1
        # Whether it is used again cannot be seen any more.
        record = history.access_record[access & (history.access_record.shape[0] - 1)]
        history.records[record & (history.records.shape[0] - 1), R_UNUSED] -= 1
    counters[C_OLDEST_ACCESS] += 1


@inlined
def new_record(history):
    """The number of a record to be filled; the oldest makes room, with the accesses that belong to it."""
    counters = history.counters
    if counters[C_NEXT_RECORD] - counters[C_OLDEST_RECORD] == history.records.shape[0]:
        ring = history.access_record.shape[0] - 1  # mask
        while (
            counters[C_OLDEST_ACCESS] < counters[C_NEXT_ACCESS]
            and history.access_record[counters[C_OLDEST_ACCESS] & ring] <= counters[C_OLDEST_RECORD]
        ):
            forget_access(history)
        counters[C_OLDEST_RECORD] += 1
    counters[C_NEXT_RECORD] += 1
    return counters[C_NEXT_RECORD] - 1


@inlined
def new_access(history, block_hash, record):
    """Note that a block was used."""
    counters = history.counters
    ring = history.access_hash.shape[0] - 1  # mask
    if counters[C_NEXT_ACCESS] - counters[C_OLDEST_ACCESS] > ring:
        forget_access(history)
    at = find(history, block_hash)
    uses = np.int32(1)
    if history.table[at] == NONE:
        counters[C_BLOCKS] += 1
    else:
        uses += history.access_uses[history.table[at] & ring]
    access = counters[C_NEXT_ACCESS]
    history.access_hash[access & ring] = block_hash
    history.access_record[access & ring] = record
    history.access_uses[access & ring] = uses
    history.table[at] = access
    counters[C_NEXT_ACCESS] += 1
