"""The state that all kernels work on: tables, pools, arrays per slot and per holder.

Memory is owned by NumPy arrays on the Python side (``arrays.py``); a kernel gets one ``int64`` array,
the *state*, that holds their addresses and counters, so that a call costs the same however many arrays
there are. Kernels never allocate: one that runs out of room stops early and returns how far it came;
the caller then makes room and continues.

A *slot* is one incarnation of (holder, tier). There are seven tables (see ``tables``):

========  ===============================  ===================================  =======================
table     key                              value                                third word
========  ===============================  ===================================  =======================
NODES     sequence hash ^ domain           holder set | depth | parent (low)    parent (high) | age
LINKS     engine hash ^ stream domain      key in NODES                         --
SETS      Zobrist hash of a holder set     holder set                           --
COPIES    node key mixed with the slot     extra copies | slot << 32            --
FANOUT    place mixed with the slot        held children | held | slot << 32    place
GAPS      place                            children without it | depth << 32    anchor, or 0
ANCHORS   place                            gaps in its stretch                  their depths
========  ===============================  ===================================  =======================
"""

from __future__ import annotations

import numpy as np

TIERS = 5
SMALL_SET = 24  # slots kept as a sorted array; larger sets become bitsets
SMALL_AGAIN = 18  # a shrinking bitset becomes an array here, below SMALL_SET so that it does not flap
PREFETCH_AHEAD = 12
MAX_EXTRA_COPIES = 63  # counted copies of one residency beyond the first
MAX_AGE = 3
SINGLE = 1 << 27

ENTRIES, CAPACITY, USED, OLD_ENTRIES, OLD_CAPACITY, CURSOR, END, OLD_END, CROWDED, SWEPT = range(10)
NODES, LINKS, SETS, COPIES, FANOUT, GAPS, ANCHORS = range(0, 70, 10)
NODE_BYTES = 20
PAIR_BYTES = 16
TRIPLE_BYTES = 24
ENTRY_BYTES = {
    NODES: NODE_BYTES,
    LINKS: PAIR_BYTES,
    SETS: PAIR_BYTES,
    COPIES: PAIR_BYTES,
    FANOUT: TRIPLE_BYTES,
    GAPS: TRIPLE_BYTES,
    ANCHORS: TRIPLE_BYTES,
}
USUAL_PERCENT = 82  # of its homes a table may have in use before it must grow
LINKS_PERCENT = 72
CROWDED_ENTRIES = 1024  # a table whose last so many positions are touched must grow

ROWS, POOL_CAPACITY, LIVE, NEXT, FREE, ROW_BYTES = range(6)
SET_POOL, SMALL_POOL, BITS_POOL = 70, 76, 82

(
    SLOT_HOLDER,  # int32 per slot: holder row, -1 once retired
    SLOT_TIER,  # int32 per slot
    SLOT_BLOCKS,  # int64 per slot: residencies
    SLOT_GAPS,  # int64 per slot: its FANOUT entries of places that it does not have
    HOLDER_SLOTS,  # int32 per (holder row, tier): slot or -1
    DEAD_BITS,  # bitset of retired slots that the sweep takes out
    SCRATCH_BITS,  # bitset, all zero between calls
    NEED,  # int32 per holder row: scratch of match
    ALIVE,  # int32 per holder row: scratch of match
    BIT_WORDS,  # words of one bitset
    GAP_DEPTHS,  # int32 per depth: gaps there without an anchor
    GAP_BITS,  # bitset over depths: whether there are such gaps
    HEAT,  # (node key, count) pairs: where recent matches ended
    MATCHES,  # since the counts in HEAT were last halved
    MAX_BLOCKS,  # nodes the index may have
    DROPPED,  # residencies dropped for want of room, and stored blocks that were not taken
    HAND,  # position of the eviction
    WANTED,  # room that the next step needs, beyond the usual
    MOVING,  # tables that are being moved
    LEAF_WAITS,  # 1: the place below is a leaf of the slot at hand, and not yet in FANOUT
    LEAF_PLACE,
    ANCHORED_PLACE,  # the place that was anchored last, and its anchor
    LAST_ANCHOR,
) = range(90, 113)
STATE_WORDS = 120

# a record of SET_POOL: four words
ZOBRIST, REFERENCES, MEMBERS, STORAGE = 0, 8, 16, 24  # STORAGE: row in SMALL_POOL, or -1 - row in BITS_POOL

# a node's second word: holder set 28 bits, depth 20 bits, parent 16 bits; then parent 30 bits, age 2 bits
SET_ID_BITS = np.uint64((1 << 28) - 1)
DEPTH_SHIFT, PARENT_SHIFT = np.uint64(28), np.uint64(48)
DEPTH_BITS = np.uint64((1 << 20) - 1)
UNKNOWN = (1 << 20) - 1
UNKNOWN_DEPTH = np.uint64(UNKNOWN)
STRETCH = 64  # depths that share an anchor, and a word of GAP_BITS
GAP_DEPTH_BITS = (1 << 17) - 1  # gaps are counted per depth modulo this + 1
NAME_SHIFT = np.uint64(18)  # a name is the top 46 bits of a mixed key
PLACE_DEPTH_BITS = np.uint64((1 << 18) - 1)
HELD = np.uint64(1 << 31)
COUNT_BITS = np.uint64((1 << 31) - 1)

HEAT_ROW_BITS = 10
HEAT_WAYS = 4
HEAT_HALVING = 1 << 14  # matches after which the counts are halved
CAREFUL = 32
MOVING_ROOM = 1024  # blocks applied at most between two steps of a table that moves
