"""Tables that move into larger arrays.

A table grows by moving its entries in order, a few at a time, so that no single call pays for it: below the
*cursor* keys live in the new arrays, from it on in the old ones.
"""

# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

import numpy as np

from cache_index.kernel_set import inlined
from cache_index.kernels.compilation import INTEGER, STATE, kernel
from cache_index.kernels.layout import (
    ANCHORS,
    CAPACITY,
    CROWDED,
    CROWDED_ENTRIES,
    CURSOR,
    END,
    ENTRIES,
    FANOUT,
    GAPS,
    MOVING,
    NODE_BYTES,
    NODES,
    OLD_CAPACITY,
    OLD_END,
    OLD_ENTRIES,
    PAIR_BYTES,
    TRIPLE_BYTES,
    USED,
)
from cache_index.kernels.machine_words import ZERO, load64, words_at
from cache_index.kernels.tables import GOLDEN, copy_entry, home_of_mixed, sort_in


@inlined
def place_entry(entries, capacity, source, entry_bytes):
    """Copy an entry from elsewhere to where it belongs; returns the address that was empty before."""
    target = entries + home_of_mixed(load64(source) * GOLDEN, capacity) * entry_bytes
    while load64(target + 8) != ZERO:
        target += entry_bytes
    copy_entry(source, target, entry_bytes)
    sort_in(entries, capacity, target, entry_bytes)
    return target


@inlined
def note_highest(state, table, address, entry_bytes):
    if address >= state[table + END] - CROWDED_ENTRIES * entry_bytes:
        state[table + CROWDED] = 1


@inlined
def move_entries(state, table, positions, entry_bytes):
    """See migrate. It pauses only at an empty position, so that no cluster is torn apart."""
    old, cursor = state[table + OLD_ENTRIES], state[table + CURSOR]
    entries, capacity = state[table + ENTRIES], state[table + CAPACITY]
    last = (state[table + OLD_END] - old) // entry_bytes
    highest = np.int64(0)
    while cursor < last:
        source = old + cursor * entry_bytes
        if load64(source + 8) != ZERO:
            highest = max(highest, place_entry(entries, capacity, source, entry_bytes))
        elif positions <= 0:
            break
        cursor += 1
        positions -= 1
    note_highest(state, table, highest, entry_bytes)
    state[table + CURSOR] = cursor
    return last - cursor


@kernel(STATE, INTEGER, INTEGER)
def migrate(address, table, positions):
    """Move about ``positions`` positions to the new arrays; return how many are left."""
    state = words_at(address)
    if table == NODES:
        left = move_entries(state, NODES, positions, NODE_BYTES)
    elif table in (FANOUT, GAPS, ANCHORS):
        left = move_entries(state, table, positions, TRIPLE_BYTES)
    else:
        left = move_entries(state, table, positions, PAIR_BYTES)
    if left == 0:
        state[table + OLD_ENTRIES] = state[table + OLD_END] = 0
        state[MOVING] -= 1
    return left


@kernel(STATE, INTEGER, INTEGER)
def unused_from(address, table, alignment):
    """A multiple of ``alignment`` into a moving table's new arrays, from which on they are still untouched.

    Returns its address. Nothing lies behind an empty entry that all keys moved so far are homed before.
    """
    state = words_at(address)
    entries, entry_bytes = state[table + ENTRIES], np.int64(PAIR_BYTES)
    if table == NODES:
        entry_bytes = np.int64(NODE_BYTES)
    elif table in (FANOUT, GAPS, ANCHORS):
        entry_bytes = np.int64(TRIPLE_BYTES)
    highest_home = (state[table + CURSOR] * state[table + CAPACITY]) // state[table + OLD_CAPACITY] + 2
    offset = (highest_home * entry_bytes // alignment + 1) * alignment
    while entries + offset < state[table + END]:
        before = entries + (offset - 1) // entry_bytes * entry_bytes  # may reach beyond the boundary
        if load64(before + 8) == ZERO:
            break
        offset += alignment
    return entries + offset


@inlined
def place_all(state, table, source, count, entry_bytes):
    entries, capacity = state[table + ENTRIES], state[table + CAPACITY]
    for i in range(count):
        address = place_entry(entries, capacity, source + i * entry_bytes, entry_bytes)
        note_highest(state, table, address, entry_bytes)
    state[table + USED] += count


@kernel(STATE, INTEGER, INTEGER, INTEGER)
def refill(address, table, source, count):
    """Put ``count`` entries that lie one behind the other at ``source`` into an empty table."""
    state = words_at(address)
    if table == NODES:
        place_all(state, NODES, source, count, NODE_BYTES)
    elif table in (FANOUT, GAPS, ANCHORS):
        place_all(state, table, source, count, TRIPLE_BYTES)
    else:
        place_all(state, table, source, count, PAIR_BYTES)
    return state[table + CROWDED]
