"""Where slots have a block without its parent, and why matching may jump.

Slots mostly have a block only with its parent. Where one does not (a removal in mid-chain, a block in a
slower tier, a store below something unknown), its parent's place is a *gap*, and GAPS counts the
(slot, child) pairs that lack it. Between two positions of a prompt without a gap, each set of live slots
is contained in the one before, provided that the later node's depth fits its position: who has the later
block has its parent's place, which is no gap, hence the parent, and so on. So where both ends have the
same set, all between have it, and where they differ, halving finds each change. Positions at gaps are
looked up one by one. They are found without looking at each position: a gap is registered with its
*anchor*, the place at the last depth divisible by 64 on the way to it, or by its depth if it has none.

To keep GAPS exact, FANOUT counts per slot and place the children the slot has: unless it is one child for a
block that it has or none for one that it has not, which leaves a few entries per chain.

All this trusts that hashes name whole prefixes, which is what they are for, and that 46 bits tell a
slot's blocks of one depth apart: with a million blocks in a slot, a pair that they do not tell apart exists
with a chance of about one in ten thousand, and harms only if one of the two is also lost in mid-chain.
"""

# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

import numpy as np

from cache_index.kernel_set import inlined, outlined
from cache_index.kernels.holder_sets import clear_bit, set_bit, zobrist
from cache_index.kernels.layout import (
    ANCHORED_PLACE,
    ANCHORS,
    COUNT_BITS,
    FANOUT,
    GAP_BITS,
    GAP_DEPTH_BITS,
    GAP_DEPTHS,
    GAPS,
    HELD,
    LAST_ANCHOR,
    LEAF_PLACE,
    LEAF_WAITS,
    SLOT_GAPS,
    STRETCH,
    TRIPLE_BYTES,
    UNKNOWN_DEPTH,
    USED,
)
from cache_index.kernels.machine_words import (
    LOW_32,
    ONE,
    ZERO,
    load32,
    load64,
    save32,
    save64,
    trailing_zeros,
    u64,
)
from cache_index.kernels.nodes import depth_of, name_of, node_at, parent_of, place_of
from cache_index.kernels.tables import claim, erase, find, mix, prefetch_entry


@inlined
def fanout_entry(state, place, slot):
    return find(state, FANOUT, mix(place + zobrist(slot)), TRIPLE_BYTES)


@inlined
def count_gaps_of_slot(state, slot, change):
    address = state[SLOT_GAPS] + 8 * slot
    save64(address, u64(np.int64(load64(address)) + change))


@inlined
def write_fanout(state, entry, place, slot, held, count):
    """``held``: whether the slot has the block at the place."""
    value = load64(entry + 8)
    if value != ZERO and (value & HELD) == ZERO:
        count_gaps_of_slot(state, slot, -1)
    if count == (1 if held else 0):
        if value != ZERO:
            erase(state, FANOUT, entry, TRIPLE_BYTES)
        return
    save64(entry + 8, (u64(slot) << u64(32)) | u64(count) | (HELD if held else ZERO))
    if not held:
        count_gaps_of_slot(state, slot, 1)
    if value == ZERO:
        save64(entry, mix(place + zobrist(slot)))
        save64(entry + 16, place)
        claim(state, FANOUT, entry, TRIPLE_BYTES)


@inlined
def count_in_stretch(state, anchor, depth, change):
    """Change the number of gaps in a stretch, and note the depth of a new one. No gap: no entry."""
    entry = find(state, ANCHORS, anchor, TRIPLE_BYTES)
    count = np.int64(load64(entry + 8)) + change
    if count <= 0:
        if load64(entry + 8) != ZERO:
            erase(state, ANCHORS, entry, TRIPLE_BYTES)
        return
    empty = load64(entry + 8) == ZERO
    depths = ZERO if empty else load64(entry + 16)
    save64(entry + 8, u64(count))
    if change > 0:
        depths |= ONE << (depth % u64(STRETCH))
    save64(entry + 16, depths)
    if empty:
        save64(entry, anchor)
        claim(state, ANCHORS, entry, TRIPLE_BYTES)


@outlined
def anchor_of(state, place, depth):
    """The place that begins the stretch of a place, on the way to the root; 0 when the way is not known."""
    first = place
    anchor = ZERO
    while True:
        if u64(state[ANCHORED_PLACE]) == place and state[LAST_ANCHOR] != 0 and depth % u64(STRETCH) != ZERO:
            anchor = u64(state[LAST_ANCHOR])
            break
        if depth % u64(STRETCH) == ZERO:
            anchor = place
            break
        entry = node_at(state, place)
        if entry == 0:
            return ZERO
        depth -= ONE
        place = place_of(parent_of(entry), depth)
    state[ANCHORED_PLACE] = np.int64(first)
    state[LAST_ANCHOR] = np.int64(anchor)
    return anchor


@inlined
def register_gap(state, anchor, depth, change):
    """Let next_gap see a gap, or not any more."""
    if anchor != ZERO:
        count_in_stretch(state, anchor, depth, change)
        return
    depth &= u64(GAP_DEPTH_BITS)
    gaps = state[GAP_DEPTHS] + 4 * np.int64(depth)
    save32(gaps, load32(gaps) + change)
    if load32(gaps) > 0:
        set_bit(state[GAP_BITS], np.int64(depth))
    else:
        clear_bit(state[GAP_BITS], np.int64(depth))


@outlined
def change_gap(state, place, depth, change):
    """Count (slot, child) pairs more or less that lack the place."""
    entry = find(state, GAPS, place, TRIPLE_BYTES)
    value = load64(entry + 8)
    count = np.int64(value & LOW_32) + change
    if count <= 0:
        if value != ZERO:
            register_gap(state, load64(entry + 16), value >> u64(32), -1)
            erase(state, GAPS, entry, TRIPLE_BYTES)
    elif value != ZERO:
        save64(entry + 8, (value & ~LOW_32) | u64(count))
    else:
        anchor = anchor_of(state, place, depth)
        save64(entry, place)
        save64(entry + 8, (depth << u64(32)) | u64(count))
        save64(entry + 16, anchor)
        claim(state, GAPS, entry, TRIPLE_BYTES)
        register_gap(state, anchor, depth, 1)


@outlined
def gain_child(state, slot, place, depth, held):
    """The slot got a child of the place; ``depth`` is that of the place."""
    entry = fanout_entry(state, place, slot)
    value = load64(entry + 8)
    count = np.int64(1) if held else np.int64(0)
    if value != ZERO:
        count = np.int64(value & COUNT_BITS)
    if not held:
        change_gap(state, place, depth, 1)
    write_fanout(state, entry, place, slot, held, count + 1)


@inlined
def settle_leaf(state, slot):
    """Write down the leaf that waits, if any."""
    if state[LEAF_WAITS] != 0:
        state[LEAF_WAITS] = 0
        place = u64(state[LEAF_PLACE])
        write_fanout(state, fanout_entry(state, place, slot), place, slot, True, 0)


@inlined
def leaf_waits_at(state, place):
    return state[LEAF_WAITS] != 0 and u64(state[LEAF_PLACE]) == place


@outlined
def lose_child(state, slot, place, depth):
    """The slot lost a child of the place."""
    entry = fanout_entry(state, place, slot)
    value = load64(entry + 8)
    if value == ZERO:  # it has the place, which is a leaf now: chains are mostly removed from their end
        settle_leaf(state, slot)
        state[LEAF_WAITS] = 1
        state[LEAF_PLACE] = np.int64(place)
        return
    held = (value & HELD) != ZERO
    if not held:
        change_gap(state, place, depth, -1)
    count = np.int64(value & COUNT_BITS)
    if count > 0:
        write_fanout(state, entry, place, slot, held, count - 1)


@outlined
def gain_place(state, slot, place, depth):
    """The slot got the block at the place; returns how many children of it it has."""
    if load64(state[SLOT_GAPS] + 8 * slot) == ZERO:
        return np.int64(0)
    entry = fanout_entry(state, place, slot)
    value = load64(entry + 8)
    if value == ZERO:
        return np.int64(0)
    count = np.int64(value & COUNT_BITS)
    change_gap(state, place, depth, -count)
    write_fanout(state, entry, place, slot, True, count)
    return count


@outlined
def lose_place(state, slot, place, depth):
    """The slot lost the block at the place."""
    if leaf_waits_at(state, place):
        state[LEAF_WAITS] = 0
        return
    entry = fanout_entry(state, place, slot)
    value = load64(entry + 8)
    count = np.int64(1) if value == ZERO else np.int64(value & COUNT_BITS)
    if count > 0:
        change_gap(state, place, depth, count)
    write_fanout(state, entry, place, slot, False, count)


@inlined
def lose_block(state, slot, entry):
    """Account for a node that leaves the slot, as far as its depth is known."""
    depth = depth_of(entry)
    if depth == UNKNOWN_DEPTH:
        return
    lose_place(state, slot, place_of(name_of(load64(entry)), depth), depth)
    if depth > ZERO:
        lose_child(state, slot, place_of(parent_of(entry), depth - ONE), depth - ONE)


@inlined
def gap_in_stretch(state, hashes, domain, first, position, stop, word):
    """The first position from ``position`` on that is in ``word`` and at a gap, else ``stop``."""
    while position < stop and word != ZERO:
        skipped = trailing_zeros(word)
        position += skipped
        if position >= stop:
            break
        place = place_of(name_of(hashes[position] ^ domain), u64(first + position))
        if load64(find(state, GAPS, place, TRIPLE_BYTES) + 8) != ZERO:
            return position
        position += 1
        word = (word >> u64(skipped)) >> ONE
    return stop


@inlined
def next_gap(state, hashes, domain, first, position, stop):
    """The first position from ``position`` on, below ``stop``, that is at a gap; else ``stop``.

    ``first`` is the depth at position 0. Looked up are the depths at which there are gaps without an anchor,
    or were gaps with this stretch's anchor since it last had none.
    """
    if state[GAPS + USED] == 0:
        return stop
    while position < stop:
        depth = first + position
        stretch = depth // STRETCH * STRETCH
        word = load64(state[GAP_BITS] + 8 * ((depth & GAP_DEPTH_BITS) >> 6))
        anchor = stretch - first
        if anchor < 0:
            word = ~ZERO
        else:
            if anchor + 4 * STRETCH < stop:
                ahead = name_of(hashes[anchor + 4 * STRETCH] ^ domain)
                prefetch_entry(state, ANCHORS, place_of(ahead, u64(stretch + 4 * STRETCH)), TRIPLE_BYTES)
            place = place_of(name_of(hashes[anchor] ^ domain), u64(stretch))
            entry = find(state, ANCHORS, place, TRIPLE_BYTES)
            if load64(entry + 8) != ZERO:
                word |= load64(entry + 16)
        end = min(stretch + STRETCH - first, stop)
        word >>= u64(depth - stretch)
        if word != ZERO:
            found = gap_in_stretch(state, hashes, domain, first, position, end, word)
            if found < end:
                return found
        position = end
    return stop
