"""The arrays of a reuse model, and the names of their columns."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Singles = NDArray[np.float32]
Ints = NDArray[np.int64]
SmallInts = NDArray[np.int32]
Words = NDArray[np.uint64]

# Ages since the last use, in bins that grow by a factor: from [0, 1 s) to [3.2 h, 4.5 h).
AGE_BINS: Final = 30
_AGE_FACTOR: Final = 1.4
AGE_EDGES_S: Final[Floats] = np.concatenate([[0.0], _AGE_FACTOR ** np.arange(AGE_BINS, dtype=np.float64)])

# Cells of statistics: rows of `Learned`, a power of two.
CELLS: Final = 1 << 14
LEVELS: Final = 5  # cells of a record, from coarse to fine


class Learned(NamedTuple):
    """How often what got to an age was used again at that age. Rows of the first two are cells."""

    reuses: Singles  # [cell, age bin], of blocks
    chances: Singles  # [cell, age bin], of blocks that got there unused
    values: Floats  # [cell, age bin]: hits a block-second, of a finest cell, as of valued_s
    valued_s: Floats  # [cell]


class History(NamedTuple):
    """What was seen lately, in two rings: records, one for blocks that are in like circumstances, and accesses.

    Numbers of records and accesses go up for ever; their place is the number modulo the ring's length,
    a power of two.
    """

    counters: Ints  # [C_COLUMNS]
    records: SmallInts  # [record, R_COLUMNS]
    record_s: Floats  # [record]: when
    access_hash: Words  # [access]
    access_record: Ints  # [access]
    access_uses: SmallInts  # [access]: of the block, this one included
    table: Ints  # open addressing by hash: number of a block's last access, or -1
    passed: Ints  # [age bin]: records below this number have got to that age, or were forgotten


C_OLDEST_RECORD: Final = 0
C_NEXT_RECORD: Final = 1
C_OLDEST_ACCESS: Final = 2
C_NEXT_ACCESS: Final = 3
C_BLOCKS: Final = 4  # known
C_COLUMNS: Final = 5

R_UNUSED: Final = 0  # blocks that were not used since
R_BEFORE: Final = 1  # records of the same request before this one
R_BEHIND: Final = 2  # and behind it
R_CELLS: Final = 3  # LEVELS columns
R_TURN: Final = R_CELLS + LEVELS  # of the request; in its first record
R_MATCHED: Final = R_TURN + 1  # blocks that were known; in a request's first record
R_PROMPT: Final = R_TURN + 2  # blocks in all; in a request's first record
R_COLUMNS: Final = R_TURN + 3


def empty_learned() -> Learned:
    return Learned(
        np.zeros((CELLS, AGE_BINS), np.float32),
        np.zeros((CELLS, AGE_BINS), np.float32),
        np.zeros((CELLS, AGE_BINS)),
        np.full(CELLS, -np.inf),
    )


def empty_history(accesses: int) -> History:
    """For the last ``accesses`` uses of blocks, rounded up to a power of two; takes about 65 bytes each."""
    accesses = max(128, 1 << (accesses - 1).bit_length())
    records = accesses // 2
    places = 2 * accesses
    return History(
        np.zeros(C_COLUMNS, np.int64),
        np.zeros((records, R_COLUMNS), np.int32),
        np.zeros(records),
        np.zeros(accesses, np.uint64),
        np.zeros(accesses, np.int64),
        np.zeros(accesses, np.int32),
        np.full(places, -1, np.int64),
        np.zeros(AGE_BINS, np.int64),
    )
