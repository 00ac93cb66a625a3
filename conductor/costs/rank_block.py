"""The block of memory that holds what was placed on one rank and has not ended, for kernels by its address.

It is a head of single words, then rows for decodes, then as many for pending prefills.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numba.np.numpy_support import carray

from cache_index.kernel_set import inlined
from conductor.costs import tables as t
from conductor.costs.addresses import floats_at, integers_at
from conductor.costs.exposure import EXPOSURE_COLUMNS
from conductor.costs.instance_class import Floats

NO_ROW: Final = -1

# ---- words of a head (float64) ----
# The first are the load table's columns before HARM, of what was placed here alone. Then:
PENDING_S: Final = t.HARM  # predicted, of all pending prefills
ALL_PLACED_S: Final = t.HARM + 1  # prefill ever placed here, as predicted
ALL_LONG_S: Final = t.HARM + 2  # of that, what steps carry that last longer than the TBT objective
OTHERS_KNOWN: Final = t.HARM + 3  # 1 when other conductors have placed something
OTHERS: Final = t.HARM + 4  # that, in the same columns as the first words; runs down from HEAD_SINCE_S on
_WHOLE_NUMBERS: Final = OTHERS + t.HARM
# ---- and whole numbers (int64) ----
ROOM: Final = _WHOLE_NUMBERS  # for as many decodes, and as many prefills
ROW: Final = _WHOLE_NUMBERS + 1  # of the load table; NO_ROW: none
TABLES: Final = _WHOLE_NUMBERS + 2  # `ClusterTables.address`
HEAD_WORDS: Final = _WHOLE_NUMBERS + 3

# ---- columns of a decode, after those of `exposure` ----
DECODE_TICKET: Final = EXPOSURE_COLUMNS
DECODE_CONTEXT_TOKENS: Final = EXPOSURE_COLUMNS + 1
DECODE_COLUMNS: Final = EXPOSURE_COLUMNS + 2

# ---- columns of a pending prefill; they run first come, first served ----
PREFILL_TICKET: Final = 0
PREFILL_PREDICTED_S: Final = 1
PREFILL_TOKENS: Final = 2  # that it computes
PREFILL_OBSERVED: Final = 3  # 1 when its end will be seen (it streams, or it hands off)
PREFILL_COLUMNS: Final = 4

_FIRST_ROOM: Final = 8


def new_block(room: int = _FIRST_ROOM) -> Floats:
    """The books of a rank that has no row and nothing placed on it."""
    block: Floats = np.zeros(HEAD_WORDS + room * (DECODE_COLUMNS + PREFILL_COLUMNS))
    block.view(np.int64)[ROOM], block.view(np.int64)[ROW] = room, NO_ROW
    return block


def rows_of(block: Floats) -> tuple[Floats, Floats]:
    """Decodes [row, column] and prefills [row, column] of a block, the rows included that are not in use."""
    room = int(block.view(np.int64)[ROOM])
    prefills = HEAD_WORDS + room * DECODE_COLUMNS
    return (
        block[HEAD_WORDS:prefills].reshape(room, DECODE_COLUMNS),
        block[prefills:].reshape(room, PREFILL_COLUMNS),
    )


def grown(block: Floats) -> Floats:
    """The same books in a block with twice the room."""
    decodes, prefills = rows_of(block)
    larger = new_block(2 * len(decodes))
    larger[:ROOM], larger[ROW:HEAD_WORDS] = block[:ROOM], block[ROW:HEAD_WORDS]
    more_decodes, more_prefills = rows_of(larger)
    more_decodes[: len(decodes)], more_prefills[: len(prefills)] = decodes, prefills
    return larger


# ---- parts of a block, and the rank's row of the load table, by the block's address ----


@inlined
def head_at(address: int) -> Floats:
    return carray(floats_at(address), (HEAD_WORDS,))


@inlined
def decodes_at(address: int) -> Floats:
    return carray(floats_at(address + 8 * HEAD_WORDS), (integers_at(address)[ROOM], DECODE_COLUMNS))


@inlined
def prefills_at(address: int) -> Floats:
    room = integers_at(address)[ROOM]
    return carray(floats_at(address + 8 * (HEAD_WORDS + room * DECODE_COLUMNS)), (room, PREFILL_COLUMNS))


@inlined
def load_at(address: int) -> Floats:
    words = integers_at(address)
    loads_address = integers_at(words[TABLES])[t.LOADS_AT]
    return carray(floats_at(loads_address + 8 * t.LOAD_COLUMNS * words[ROW]), (1, t.LOAD_COLUMNS))


@inlined
def speeds_at(address: int) -> Floats:
    words = integers_at(address)
    tables = integers_at(words[TABLES])
    class_id = integers_at(tables[t.RANKS_AT])[t.RANK_COLUMNS * words[ROW] + t.CLASS]
    return carray(floats_at(tables[t.CLASSES_AT] + 8 * t.CLASS_COLUMNS * class_id), (t.CLASS_COLUMNS,))
