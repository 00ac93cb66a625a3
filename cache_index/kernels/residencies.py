"""Blocks that slots get and lose."""

# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

import numpy as np

from cache_index.kernel_set import inlined, outlined
from cache_index.kernels.compilation import IN_U64, INTEGER, STATE, WORD, kernel
from cache_index.kernels.copies import add_copy, drop_copy
from cache_index.kernels.gaps import (
    fanout_entry,
    gain_child,
    gain_place,
    lose_block,
    settle_leaf,
    write_fanout,
)
from cache_index.kernels.holder_sets import (
    contains,
    is_live,
    next_member,
    release,
    retain,
    with_slot,
    without_slot,
)
from cache_index.kernels.layout import (
    DROPPED,
    LEAF_PLACE,
    LEAF_WAITS,
    LINKS,
    NODE_BYTES,
    NODES,
    PAIR_BYTES,
    PREFETCH_AHEAD,
    SET_ID_BITS,
    SINGLE,
    SLOT_BLOCKS,
    UNKNOWN_DEPTH,
)
from cache_index.kernels.machine_words import ONE, ZERO, load64, save64, u64, words_at
from cache_index.kernels.nodes import (
    age_of,
    depth_of,
    has_place,
    link,
    name_of,
    parent_of,
    place_of,
    set_of,
    write_age,
    write_node,
    write_set,
)
from cache_index.kernels.room import has_room_to_rewrite, removal_room, room
from cache_index.kernels.tables import claim, erase, find, prefetch_run


@outlined
def rewrite_place(state, entry, depth, parent, above):
    """Correct a node's depth and parent; ``above`` is the parent's set. All its holders are accounted anew."""
    set_id = set_of(entry)
    slot = next_member(state, set_id, np.int64(0))
    while slot >= 0:
        if is_live(state, slot):
            lose_block(state, slot, entry)
            settle_leaf(state, slot)
        slot = next_member(state, set_id, slot + 1)
    age = age_of(entry)
    write_node(entry, set_id, depth, parent)
    write_age(entry, age)
    place = place_of(name_of(load64(entry)), depth)
    slot = next_member(state, set_id, np.int64(0))
    while slot >= 0:
        if is_live(state, slot):
            if gain_place(state, slot, place, depth) == 0:
                write_fanout(state, fanout_entry(state, place, slot), place, slot, True, 0)
            if depth > ZERO:
                held = above != 0 and contains(state, above, slot)
                gain_child(state, slot, place_of(parent, depth - ONE), depth - ONE, held)
        slot = next_member(state, set_id, slot + 1)


@kernel(STATE, INTEGER, IN_U64, IN_U64, WORD, WORD, INTEGER)
def store(address, slot, hashes, engine_keys, domain, parent, start):
    """Give ``slot`` the blocks of one chain from position ``start`` on; return the position reached.

    ``engine_keys``, one per block or none, are linked to the blocks. A block that the slot already has
    gains a copy. Of a node that two callers place differently the deeper place counts. Blocks whose
    beginning had to be dropped meanwhile for want of room are dropped as well.
    """
    state = words_at(address)
    stop = min(hashes.shape[0], start + room(state))
    linked = engine_keys.shape[0] > 0
    for i in range(start, min(stop, start + PREFETCH_AHEAD)):
        prefetch_run(state, NODES, hashes[i] ^ domain, NODE_BYTES)
        if linked:
            prefetch_run(state, LINKS, engine_keys[i], PAIR_BYTES)
    if start > 0:
        parent = hashes[start - 1]
    depth, above, above_name, above_place = ZERO, np.int64(0), ZERO, ZERO  # above: the set before the block
    above_held = False
    if parent != ZERO:
        depth = UNKNOWN_DEPTH
        above_name = name_of(parent ^ domain)
        entry = find(state, NODES, parent ^ domain, NODE_BYTES)
        if load64(entry + 8) != ZERO:
            above = set_of(entry)
            above_held = contains(state, above, slot)
            depth = depth_of(entry)
            above_place = place_of(above_name, depth)
            if depth != UNKNOWN_DEPTH:
                depth += ONE
        elif start > 0:
            state[DROPPED] += hashes.shape[0] - start
            return hashes.shape[0]
    before = np.int64(0)  # the last transition: set `before` with the slot is set `after`
    after = np.int64(0)
    added = 0
    last = np.int64(0)
    state[LEAF_WAITS] = 0
    position = start
    while position < stop:
        if position + PREFETCH_AHEAD < stop:
            prefetch_run(state, NODES, hashes[position + PREFETCH_AHEAD] ^ domain, NODE_BYTES)
            if linked:
                prefetch_run(state, LINKS, engine_keys[position + PREFETCH_AHEAD], PAIR_BYTES)
        key = hashes[position] ^ domain
        entry = find(state, NODES, key, NODE_BYTES)
        value = load64(entry + 8)
        set_id = np.int64(value & SET_ID_BITS)
        fits = True
        if value == ZERO:
            save64(entry, key)
            write_node(entry, SINGLE + slot, depth, above_name)
            entry = claim(state, NODES, entry, NODE_BYTES)
            gained = True
        else:
            fits = depth_of(entry) == depth and parent_of(entry) == above_name
            if not fits and depth != UNKNOWN_DEPTH:
                recorded = depth_of(entry)
                if recorded == UNKNOWN_DEPTH or recorded < depth:
                    if not has_room_to_rewrite(state, set_id):
                        break
                    settle_leaf(state, slot)
                    rewrite_place(state, entry, depth, above_name, above)
                    fits = True
            gained = set_id == before or not contains(state, set_id, slot)
            if not gained:
                add_copy(state, key, slot)
            else:
                if set_id != before:
                    target = with_slot(state, set_id, slot)
                    retain(state, target)
                    retain(state, set_id)
                    release(state, before)
                    release(state, after)
                    before = set_id
                    after = target
                write_set(entry, after)
                retain(state, after)
                release(state, set_id)
        depth = depth_of(entry)
        name = name_of(key)
        place = place_of(name, depth)
        if gained:
            added += 1
            if depth != UNKNOWN_DEPTH:
                if depth > ZERO:
                    if not fits:
                        settle_leaf(state, slot)
                        above_place = place_of(parent_of(entry), depth - ONE)
                        above_held = has_place(state, above_place, slot)
                    if state[LEAF_WAITS] != 0 and above_held:
                        state[LEAF_WAITS] = 0
                    else:
                        gain_child(state, slot, above_place, depth - ONE, above_held)
                settle_leaf(state, slot)
                if gain_place(state, slot, place, depth) == 0:
                    state[LEAF_WAITS] = 1
                    state[LEAF_PLACE] = np.int64(place)
        settle = not gained or depth == UNKNOWN_DEPTH
        if settle:
            settle_leaf(state, slot)
        if linked:
            link(state, engine_keys[position], key)
        above, above_name, above_place, above_held = set_of(entry), name, place, True
        if depth != UNKNOWN_DEPTH:
            depth += ONE
        last = entry
        position += 1
    if last != 0:
        write_age(last, 1)
    settle_leaf(state, slot)
    release(state, before)
    release(state, after)
    blocks = state[SLOT_BLOCKS] + slot * 8
    save64(blocks, load64(blocks) + u64(added))
    return max(start, position)


@inlined
def leave_node(state, slot, entry):
    """Take a node from a slot that has it; whether the node is gone."""
    lose_block(state, slot, entry)
    blocks = state[SLOT_BLOCKS] + slot * 8
    save64(blocks, load64(blocks) - ONE)
    set_id = set_of(entry)
    target = without_slot(state, set_id, slot)
    if target == 0:
        erase(state, NODES, entry, NODE_BYTES)
        return True
    retain(state, target)
    write_set(entry, target)
    release(state, set_id)
    return False


@inlined
def take(state, slot, key):
    """Take one copy of a block from a slot. 0: it had none, 1: it had, 2: and the node is gone."""
    entry = find(state, NODES, key, NODE_BYTES)
    if load64(entry + 8) == ZERO:
        return 2
    if not contains(state, set_of(entry), slot):
        return 0
    if drop_copy(state, key, slot):
        return 1
    return 2 if leave_node(state, slot, entry) else 1


@kernel(STATE, INTEGER, IN_U64, WORD, INTEGER)
def remove(address, slot, hashes, domain, start):
    """Take one copy of each block from ``slot``; return the position reached."""
    state = words_at(address)
    state[LEAF_WAITS] = 0
    stop = min(hashes.shape[0], start + removal_room(state))
    for i in range(start, min(stop, start + PREFETCH_AHEAD)):
        prefetch_run(state, NODES, hashes[i] ^ domain, NODE_BYTES)
    for i in range(start, stop):
        if i + PREFETCH_AHEAD < stop:
            prefetch_run(state, NODES, hashes[i + PREFETCH_AHEAD] ^ domain, NODE_BYTES)
        take(state, slot, hashes[i] ^ domain)
    settle_leaf(state, slot)
    return max(start, stop)


@inlined
def prefetch_linked(state, engine_key):
    key = load64(find(state, LINKS, engine_key, PAIR_BYTES) + 8)
    prefetch_run(state, NODES, key, NODE_BYTES)


@kernel(STATE, INTEGER, IN_U64, INTEGER)
def remove_linked(address, slot, engine_keys, start):
    """Like remove, by engine keys; links of nodes that are gone are dropped.

    Returns the position reached and how many engine keys were unknown.
    """
    state = words_at(address)
    state[LEAF_WAITS] = 0
    stop = min(engine_keys.shape[0], start + removal_room(state))
    unknown = 0
    for i in range(start, min(stop, start + 2 * PREFETCH_AHEAD)):
        prefetch_run(state, LINKS, engine_keys[i], PAIR_BYTES)
    for i in range(start, min(stop, start + PREFETCH_AHEAD)):
        prefetch_linked(state, engine_keys[i])
    for i in range(start, stop):
        if i + 2 * PREFETCH_AHEAD < stop:
            prefetch_run(state, LINKS, engine_keys[i + 2 * PREFETCH_AHEAD], PAIR_BYTES)
        if i + PREFETCH_AHEAD < stop:
            prefetch_linked(state, engine_keys[i + PREFETCH_AHEAD])
        entry = find(state, LINKS, engine_keys[i], PAIR_BYTES)
        key = load64(entry + 8)
        if key == ZERO:
            unknown += 1
        elif take(state, slot, key) == 2:
            erase(state, LINKS, entry, PAIR_BYTES)
    settle_leaf(state, slot)
    return max(start, stop), unknown


@kernel(STATE, WORD)
def resolve(address, engine_key):
    """The node key linked to an engine key, 0 when there is none."""
    state = words_at(address)
    return load64(find(state, LINKS, engine_key, PAIR_BYTES) + 8)
