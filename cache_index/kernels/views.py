"""What is in the index, for those who look at it."""

# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

import numpy as np

from cache_index.kernel_set import inlined
from cache_index.kernels.compilation import IN_I32, IN_U64, INTEGER, OUT_U64, STATE, WORD, kernel
from cache_index.kernels.holder_sets import bits_row, contains, members_of, record_of, small_row
from cache_index.kernels.layout import (
    BIT_WORDS,
    CAPACITY,
    DEPTH_BITS,
    DEPTH_SHIFT,
    END,
    ENTRIES,
    MEMBERS,
    NODE_BYTES,
    NODES,
    SET_ID_BITS,
    SINGLE,
    SLOT_HOLDER,
    STORAGE,
    UNKNOWN_DEPTH,
)
from cache_index.kernels.machine_words import ONE, ZERO, load32, load64, trailing_zeros, u64, words_at
from cache_index.kernels.nodes import depth_of, entry_at, node_at, parent_of, place_of, set_of
from cache_index.kernels.tables import find


@kernel(STATE, INTEGER, OUT_U64)
def keys_of_slot(address, slot, keys):
    """Write the keys of the slot's blocks to ``keys``; return their number. NODES must not be moving."""
    state = words_at(address)
    count = 0
    for position in range((state[NODES + END] - state[NODES + ENTRIES]) // NODE_BYTES):
        entry = state[NODES + ENTRIES] + position * NODE_BYTES
        if count == keys.shape[0]:
            break
        if load64(entry + 8) != ZERO and contains(state, set_of(entry), slot):
            keys[count] = load64(entry)
            count += 1
    return count


@kernel(STATE, IN_I32, IN_U64, WORD, nogil=False)
def held_run(address, slots, hashes, domain):
    """How many of the blocks, from the first on, are each in one of the slots; those below 0 are none."""
    state = words_at(address)
    for position in range(hashes.shape[0]):
        set_id = set_of(entry_at(state, hashes, domain, position))
        held = False
        for slot in slots:
            held = held or (set_id != 0 and slot >= 0 and contains(state, set_id, slot))
        if not held:
            return position
    return hashes.shape[0]


@inlined
def common_beginning(run, chain, start, stride):
    """How many hashes ``run`` and ``chain[start:]`` have in common at their beginning, in multiples of ``stride``.

    One that is equal stands for all before it.
    """
    equal, differ = np.int64(0), min(len(run), len(chain) - start) // stride + 1
    middle = differ - 1  # often all of them
    while equal + 1 < differ:
        if run[stride * middle - 1] == chain[start + stride * middle - 1]:
            equal = middle
        else:
            differ = middle
        middle = (equal + differ) >> 1
    return equal * stride


@inlined
def has_live_member(state, set_id):
    if set_id >= SINGLE:
        return load32(state[SLOT_HOLDER] + 4 * (set_id - SINGLE)) >= 0
    record = record_of(state, set_id)
    storage = np.int64(load64(record + STORAGE))
    if storage >= 0:
        row = small_row(state, storage)
        for i in range(np.int64(load64(record + MEMBERS))):
            if load32(state[SLOT_HOLDER] + 4 * load32(row + 4 * i)) >= 0:
                return True
        return False
    bits = bits_row(state, -1 - storage)
    for word_index in range(state[BIT_WORDS]):
        word = load64(bits + 8 * word_index)
        while word != ZERO:
            if load32(state[SLOT_HOLDER] + 4 * (word_index * 64 + trailing_zeros(word))) >= 0:
                return True
            word &= word - ONE
    return False


@inlined
def page_end(state, first, positions):
    """Behind the page of so many positions of NODES that begins at ``first``; the last page has the spare ones."""
    if first + positions < state[NODES + CAPACITY]:
        return first + positions
    return (state[NODES + END] - state[NODES + ENTRIES]) // NODE_BYTES


@kernel(STATE, INTEGER, INTEGER, OUT_U64)
def count_by_depth(address, first, positions, counts):
    """Count the nodes in a page of NODES per depth; the last count takes all deeper."""
    state = words_at(address)
    for position in range(first, page_end(state, first, positions)):
        value = load64(state[NODES + ENTRIES] + position * NODE_BYTES + 8)
        if value != ZERO and has_live_member(state, np.int64(value & SET_ID_BITS)):
            depth = np.int64((value >> DEPTH_SHIFT) & DEPTH_BITS)
            counts[min(depth, counts.shape[0] - 1)] += ONE


@inlined
def parent_key(state, entry):
    """Key of a node's parent, 0 for a root and where the parent is not known."""
    depth = depth_of(entry)
    if depth in (ZERO, UNKNOWN_DEPTH):
        return ZERO
    above = node_at(state, place_of(parent_of(entry), depth - ONE))
    return load64(above) if above != 0 else ZERO


@kernel(STATE, INTEGER, INTEGER, INTEGER, INTEGER, OUT_U64)
def nodes_by_depth(address, first, positions, low, high, nodes):
    """Collect nodes with low <= depth < high as (key, depth, parent key) triples in ``nodes``.

    Looks at a page of NODES and stops when ``nodes`` is full; returns their number.
    """
    state = words_at(address)
    count = 0
    for position in range(first, page_end(state, first, positions)):
        if 3 * count + 3 > nodes.shape[0]:
            break
        entry = state[NODES + ENTRIES] + position * NODE_BYTES
        value = load64(entry + 8)
        depth = np.int64(depth_of(entry))
        if value != ZERO and low <= depth < high and has_live_member(state, set_of(entry)):
            nodes[3 * count] = load64(entry)
            nodes[3 * count + 1] = u64(depth)
            nodes[3 * count + 2] = parent_key(state, entry)
            count += 1
    return count


@kernel(STATE, WORD, OUT_U64)
def slots_of_node(address, key, slots):
    """Write the slots that have the node, retired ones included, to ``slots``; return their number."""
    state = words_at(address)
    set_id = set_of(find(state, NODES, key, NODE_BYTES))
    if set_id == 0:
        return 0
    count = 0
    for slot in range(slots.shape[0]):
        if contains(state, set_id, slot):
            slots[count] = u64(slot)
            count += 1
    return count


@kernel(STATE, WORD, OUT_U64)
def describe_node(address, key, found):
    """Write depth, parent's key and holder slots of a node to ``found``; return whether there is one."""
    state = words_at(address)
    entry = find(state, NODES, key, NODE_BYTES)
    if load64(entry + 8) == ZERO:
        return 0
    found[0] = depth_of(entry)
    found[1] = parent_key(state, entry)
    found[2] = u64(members_of(state, set_of(entry)))
    return 1
