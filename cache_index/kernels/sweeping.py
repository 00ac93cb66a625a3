"""Taking out what retired slots and vanished nodes left behind, a piece at a time."""

# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

import numpy as np

from cache_index.kernel_set import inlined
from cache_index.kernels.compilation import INTEGER, STATE, kernel
from cache_index.kernels.gaps import change_gap
from cache_index.kernels.holder_sets import (
    bits_row,
    has_bit,
    record_of,
    release,
    retain,
    small_row,
    without_slot,
)
from cache_index.kernels.layout import (
    BIT_WORDS,
    COPIES,
    COUNT_BITS,
    DEAD_BITS,
    END,
    ENTRIES,
    FANOUT,
    HELD,
    LINKS,
    MEMBERS,
    NODE_BYTES,
    NODES,
    PAIR_BYTES,
    PREFETCH_AHEAD,
    SINGLE,
    STORAGE,
    SWEPT,
    TRIPLE_BYTES,
)
from cache_index.kernels.machine_words import ZERO, load32, load64, trailing_zeros, u64, words_at
from cache_index.kernels.nodes import set_of, write_set
from cache_index.kernels.room import removal_room
from cache_index.kernels.tables import erase, find, prefetch_entry


@inlined
def dead_member(state, set_id):
    """A retired slot of the set, -1 when it has none."""
    dead = state[DEAD_BITS]
    if set_id >= SINGLE:
        return set_id - SINGLE if has_bit(dead, set_id - SINGLE) else np.int64(-1)
    record = record_of(state, set_id)
    storage = np.int64(load64(record + STORAGE))
    if storage >= 0:
        row = small_row(state, storage)
        for i in range(np.int64(load64(record + MEMBERS))):
            slot = load32(row + 4 * i)
            if has_bit(dead, slot):
                return slot
        return np.int64(-1)
    bits = bits_row(state, -1 - storage)
    for word_index in range(state[BIT_WORDS]):
        word = load64(bits + 8 * word_index) & load64(dead + 8 * word_index)
        if word != ZERO:
            return word_index * 64 + trailing_zeros(word)
    return np.int64(-1)


@inlined
def without_dead(state, set_id):
    """The set without retired slots, 0 when nothing is left; it comes with one reference."""
    retain(state, set_id)
    slot = dead_member(state, set_id)
    while slot >= 0:
        smaller = without_slot(state, set_id, slot)
        retain(state, smaller)
        release(state, set_id)
        set_id = smaller
        slot = dead_member(state, set_id) if set_id != 0 else np.int64(-1)
    return set_id


@kernel(STATE, INTEGER)
def sweep(address, positions):
    """Take retired slots out of the next positions of NODES; return how many positions are left.

    NODES must not be moving, here and below.
    """
    state = words_at(address)
    positions_of_table = (state[NODES + END] - state[NODES + ENTRIES]) // NODE_BYTES
    while state[NODES + SWEPT] < positions_of_table and positions > 0 and removal_room(state) > 2:
        entry = state[NODES + ENTRIES] + state[NODES + SWEPT] * NODE_BYTES
        positions -= 1
        if load64(entry + 8) != ZERO:
            set_id = set_of(entry)
            if dead_member(state, set_id) >= 0:
                target = without_dead(state, set_id)
                release(state, set_id)
                if target == 0:
                    erase(state, NODES, entry, NODE_BYTES)
                    continue  # another entry may have moved here
                write_set(entry, target)
        state[NODES + SWEPT] += 1
    return positions_of_table - state[NODES + SWEPT]


@inlined
def sweep_marks(state, table, positions, entry_bytes):
    positions_of_table = (state[table + END] - state[table + ENTRIES]) // entry_bytes
    while state[table + SWEPT] < positions_of_table and positions > 0:
        entry = state[table + ENTRIES] + state[table + SWEPT] * entry_bytes
        positions -= 1
        value = load64(entry + 8)
        if value != ZERO and has_bit(state[DEAD_BITS], np.int64(value >> u64(32))):
            if table == FANOUT and (value & HELD) == ZERO:
                change_gap(state, load64(entry + 16), ZERO, -np.int64(value & COUNT_BITS))
            erase(state, table, entry, entry_bytes)
        else:
            state[table + SWEPT] += 1
    return positions_of_table - state[table + SWEPT]


@kernel(STATE, INTEGER)
def sweep_fanout(address, positions):
    """Drop what FANOUT and GAPS know of retired slots; see sweep."""
    return sweep_marks(words_at(address), FANOUT, positions, TRIPLE_BYTES)


@kernel(STATE, INTEGER)
def sweep_copies(address, positions):
    """Drop the copies of retired slots; see sweep."""
    return sweep_marks(words_at(address), COPIES, positions, PAIR_BYTES)


@kernel(STATE, INTEGER)
def sweep_links(address, positions):
    """Drop links whose node is gone; see sweep."""
    state = words_at(address)
    positions_of_table = (state[LINKS + END] - state[LINKS + ENTRIES]) // PAIR_BYTES
    while state[LINKS + SWEPT] < positions_of_table and positions > 0:
        entry = state[LINKS + ENTRIES] + state[LINKS + SWEPT] * PAIR_BYTES
        ahead = state[LINKS + SWEPT] + PREFETCH_AHEAD
        if ahead < positions_of_table:
            key_ahead = load64(state[LINKS + ENTRIES] + ahead * PAIR_BYTES + 8)
            prefetch_entry(state, NODES, key_ahead, NODE_BYTES)
        positions -= 1
        key = load64(entry + 8)
        if key != ZERO and load64(find(state, NODES, key, NODE_BYTES) + 8) == ZERO:
            erase(state, LINKS, entry, PAIR_BYTES)
        else:
            state[LINKS + SWEPT] += 1
    return positions_of_table - state[LINKS + SWEPT]
