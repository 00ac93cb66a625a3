"""Hash tables: open addressing with linear probing, and deletion by backward shift.

The home position is in proportion to the top bits of the mixed key, with spare positions behind the last
home instead of wrapping around. An entry is empty where its second word is 0. The entries of a cluster (a
run without an empty one) stand in the order of their homes, so that a deletion is over at the first entry
that is at home: looking at all up to the cluster's end would take most of the time of a removal.
"""

# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

import numpy as np

from cache_index.kernel_set import inlined
from cache_index.kernels.layout import (
    CAPACITY,
    CROWDED,
    CROWDED_ENTRIES,
    CURSOR,
    END,
    ENTRIES,
    LINKS,
    LINKS_PERCENT,
    NODE_BYTES,
    OLD_CAPACITY,
    OLD_END,
    OLD_ENTRIES,
    SWEPT,
    TRIPLE_BYTES,
    USED,
    USUAL_PERCENT,
)
from cache_index.kernels.machine_words import ZERO, load32, load64, prefetch, save32, save64, u64

GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@inlined
def home_of_mixed(mixed, capacity):
    return np.int64(((mixed >> u64(32)) * u64(capacity)) >> u64(32))


@inlined
def home_address(state, table, mixed, entry_bytes):
    """Where the search for a mixed key begins, in the half of a moving table that is in charge."""
    if state[table + OLD_ENTRIES] != 0:
        position = home_of_mixed(mixed, state[table + OLD_CAPACITY])
        if position >= state[table + CURSOR]:
            return state[table + OLD_ENTRIES] + position * entry_bytes
    return state[table + ENTRIES] + home_of_mixed(mixed, state[table + CAPACITY]) * entry_bytes


@inlined
def find(state, table, key, entry_bytes):
    """Address of the key's entry, or of the empty one where it belongs."""
    address = home_address(state, table, key * GOLDEN, entry_bytes)
    while load64(address + 8) != ZERO and load64(address) != key:
        address += entry_bytes
    return address


@inlined
def prefetch_entry(state, table, key, entry_bytes):
    prefetch(home_address(state, table, key * GOLDEN, entry_bytes))


@inlined
def prefetch_run(state, table, key, entry_bytes):
    """For what looks beyond the key's entry: until the next empty one."""
    address = home_address(state, table, key * GOLDEN, entry_bytes)
    prefetch(address)
    prefetch(address + 64)
    prefetch(address + 128)
    prefetch(address + 192)


@inlined
def copy_entry(source, target, entry_bytes):
    save64(target, load64(source))
    save64(target + 8, load64(source + 8))
    if entry_bytes == NODE_BYTES:
        save32(target + 16, load32(source + 16))
    elif entry_bytes == TRIPLE_BYTES:
        save64(target + 16, load64(source + 16))


@inlined
def sort_in(entries, capacity, address, entry_bytes):
    """Move the last entry of a cluster before those that are homed behind its home; returns its new address."""
    key, value = load64(address), load64(address + 8)
    home = home_of_mixed(key * GOLDEN, capacity)
    first = entries + home * entry_bytes
    if address == first:
        return address
    third = ZERO
    if entry_bytes == NODE_BYTES:
        third = u64(load32(address + 16))
    elif entry_bytes == TRIPLE_BYTES:
        third = load64(address + 16)
    end = address
    while address > first:
        before = address - entry_bytes
        if home_of_mixed(load64(before) * GOLDEN, capacity) <= home:
            break
        copy_entry(before, address, entry_bytes)
        address = before
    if address != end:
        save64(address, key)
        save64(address + 8, value)
        if entry_bytes == NODE_BYTES:
            save32(address + 16, np.int64(third))
        elif entry_bytes == TRIPLE_BYTES:
            save64(address + 16, third)
    return address


@inlined
def claim(state, table, address, entry_bytes):
    """Count the entry just written at ``address``, which was empty; returns where it is from now on.

    Other entries may have moved on by one place.
    """
    state[table + USED] += 1
    crowded = CROWDED_ENTRIES * entry_bytes
    in_new = state[table + END] - crowded <= address < state[table + END]
    if in_new or state[table + OLD_END] - crowded <= address < state[table + OLD_END]:
        state[table + CROWDED] = 1
    if state[table + ENTRIES] <= address < state[table + END]:
        return sort_in(state[table + ENTRIES], state[table + CAPACITY], address, entry_bytes)
    return sort_in(state[table + OLD_ENTRIES], state[table + OLD_CAPACITY], address, entry_bytes)


@inlined
def erase(state, table, address, entry_bytes):
    """Remove the entry at ``address`` and close the gap it leaves in its cluster."""
    entries, capacity = state[table + ENTRIES], state[table + CAPACITY]
    swept = entries + state[table + SWEPT] * entry_bytes
    if address < entries or address >= state[table + END]:
        entries, capacity = state[table + OLD_ENTRIES], state[table + OLD_CAPACITY]
    hole = address
    address += entry_bytes
    while load64(address + 8) != ZERO:
        if entries + home_of_mixed(load64(address) * GOLDEN, capacity) * entry_bytes >= address:
            break  # it is where it belongs, and all behind are homed behind it
        copy_entry(address, hole, entry_bytes)
        if address == swept:  # it was not swept yet and slipped below the cursor
            state[table + SWEPT] = (hole - entries) // entry_bytes
        hole = address
        address += entry_bytes
    save64(hole + 8, ZERO)
    state[table + USED] -= 1


@inlined
def table_room(state, table):
    """Entries that may still be added before the table must grow."""
    if state[table + CROWDED] != 0:
        return np.int64(0)
    percent = LINKS_PERCENT if table == LINKS else USUAL_PERCENT
    return state[table + CAPACITY] * percent // 100 - state[table + USED]


@inlined
def mix(word):
    word ^= word >> u64(32)
    word *= u64(0xD6E8FEB86659FD93)
    word ^= word >> u64(32)
    word *= u64(0xD6E8FEB86659FD93)
    return word ^ (word >> u64(32))
