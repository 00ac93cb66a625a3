"""Dropping nodes of a full index: ends of chains that were neither stored nor matched lately first."""

# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

import numpy as np

from cache_index.kernel_set import inlined, outlined
from cache_index.kernels.compilation import INTEGER, STATE, kernel
from cache_index.kernels.copies import drop_copies
from cache_index.kernels.gaps import fanout_entry, leaf_waits_at, settle_leaf
from cache_index.kernels.holder_sets import is_live, members_of, next_member, release, retain, without_slot
from cache_index.kernels.layout import (
    COUNT_BITS,
    DROPPED,
    END,
    ENTRIES,
    FANOUT,
    HAND,
    HELD,
    LEAF_WAITS,
    NODE_BYTES,
    NODES,
    SINGLE,
    TRIPLE_BYTES,
)
from cache_index.kernels.machine_words import LOW_32, ONE, ZERO, load64, u64, words_at
from cache_index.kernels.nodes import (
    age_of,
    depth_of,
    node_at,
    parent_of,
    place_of,
    set_of,
    write_age,
    write_set,
)
from cache_index.kernels.residencies import leave_node
from cache_index.kernels.room import removal_room
from cache_index.kernels.tables import erase


@inlined
def drop_tail(state, slot, entry, wanted):
    """Drop a leaf that only ``slot`` has, and what lies above it as long as that is unshared and cold."""
    dropped = 0
    state[LEAF_WAITS] = 0
    while dropped < wanted and removal_room(state) > 2:
        drop_copies(state, load64(entry), slot)
        depth = depth_of(entry)
        above = place_of(parent_of(entry), depth - ONE)
        leave_node(state, slot, entry)
        dropped += 1
        if depth == ZERO or not leaf_waits_at(state, above):
            break
        entry = node_at(state, above)
        if entry == 0 or set_of(entry) != SINGLE + slot or age_of(entry) > 0:
            break
    settle_leaf(state, slot)
    state[DROPPED] += dropped
    return dropped


@inlined
def is_shared_leaf(state, entry, place):
    """Whether no live holder of the node has a child of it, and there is room to take it from all."""
    set_id = set_of(entry)
    if removal_room(state) <= 2 * members_of(state, set_id) + 2:
        return False
    slot = next_member(state, set_id, np.int64(0))
    while slot >= 0:
        if is_live(state, slot):
            value = load64(fanout_entry(state, place, slot) + 8)
            if value == ZERO or (value & COUNT_BITS) != ZERO:
                return False
        slot = next_member(state, set_id, slot + 1)
    return True


@outlined
def drop_node(state, entry):
    """Take a node from all its holders."""
    set_id = set_of(entry)
    retain(state, set_id)
    slot = next_member(state, set_id, np.int64(0))
    while slot >= 0 and load64(entry + 8) != ZERO:
        if is_live(state, slot):
            state[LEAF_WAITS] = 0
            drop_copies(state, load64(entry), slot)
            leave_node(state, slot, entry)
            settle_leaf(state, slot)
            state[DROPPED] += 1
        else:
            target = without_slot(state, set_of(entry), slot)
            retain(state, target)
            release(state, set_of(entry))
            if target == 0:
                erase(state, NODES, entry, NODE_BYTES)
            else:
                write_set(entry, target)
        last = next_member(state, set_id, slot + 1)
        if last < 0:
            break
        slot = last
    release(state, set_id)


@kernel(STATE, INTEGER, INTEGER)
def drop_leaves(address, wanted, shared):
    """One round over the ends of chains: drop cold ones until ``wanted`` nodes are gone, cool the others.

    ``shared``: not only those with a single holder. Returns how many nodes went. FANOUT must not be
    moving.
    """
    state = words_at(address)
    entries = state[FANOUT + ENTRIES]
    positions_of_table = (state[FANOUT + END] - entries) // TRIPLE_BYTES
    dropped = 0
    left = positions_of_table
    while left > 0 and dropped < wanted and removal_room(state) > 2:
        if state[HAND] >= positions_of_table:
            state[HAND] = 0
        entry = entries + state[HAND] * TRIPLE_BYTES
        value = load64(entry + 8)
        left -= 1
        slot = np.int64(value >> u64(32))
        if (value & LOW_32) == HELD and is_live(state, slot):
            place = load64(entry + 16)
            node = node_at(state, place)
            if node != 0 and age_of(node) > 0:
                write_age(node, age_of(node) - 1)
            elif node != 0 and set_of(node) == SINGLE + slot:
                dropped += drop_tail(state, slot, node, wanted - dropped)
                continue
            elif node != 0 and shared != 0 and is_shared_leaf(state, node, place):
                drop_node(state, node)
                dropped += 1
                continue
        state[HAND] += 1
    return dropped


@kernel(STATE, INTEGER, INTEGER)
def drop_any(address, wanted, start):
    """Drop up to ``wanted`` nodes whatever they are, from a position of NODES on; return the position.

    NODES must not be moving.
    """
    state = words_at(address)
    positions_of_table = (state[NODES + END] - state[NODES + ENTRIES]) // NODE_BYTES
    while start < positions_of_table and wanted > 0:
        entry = state[NODES + ENTRIES] + start * NODE_BYTES
        if load64(entry + 8) == ZERO:
            start += 1
            continue
        if removal_room(state) <= 2 * members_of(state, set_of(entry)) + 2:
            break
        drop_node(state, entry)
        wanted -= 1
    return start
