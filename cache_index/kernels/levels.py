"""What each holder has of a prompt, as a match goes along it.

NEED holds, per holder row, the lowest tier level that covers every block so far: the maximum over the
blocks of the lowest tier that has the block. Level TIERS means that the holder is out.
"""

# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

import numpy as np

from cache_index.kernel_set import inlined
from cache_index.kernels.holder_sets import bits_row, clear_bit, contains, record_of, set_bit, small_row
from cache_index.kernels.layout import (
    ALIVE,
    BIT_WORDS,
    HOLDER_SLOTS,
    MEMBERS,
    NEED,
    SCRATCH_BITS,
    SINGLE,
    SLOT_HOLDER,
    SLOT_TIER,
    STORAGE,
    TIERS,
)
from cache_index.kernels.machine_words import ONE, ZERO, load32, load64, save32, save64, trailing_zeros, u64


@inlined
def start_slot(state, slot, alive):
    """Enter a slot of the first block's set; returns the number of holders alive."""
    row = load32(state[SLOT_HOLDER] + 4 * slot)
    if row < 0:
        return alive
    tier = load32(state[SLOT_TIER] + 4 * slot)
    need = state[NEED] + 4 * row
    if load32(need) == TIERS:
        save32(state[ALIVE] + 4 * alive, row)
        alive += 1
        save32(need, tier)
    elif tier < load32(need):
        save32(need, tier)
    return alive


@inlined
def start_set(state, set_id):
    if set_id >= SINGLE:
        return start_slot(state, set_id - SINGLE, np.int64(0))
    alive = np.int64(0)
    record = record_of(state, set_id)
    storage = np.int64(load64(record + STORAGE))
    if storage >= 0:
        row = small_row(state, storage)
        for i in range(np.int64(load64(record + MEMBERS))):
            alive = start_slot(state, load32(row + 4 * i), alive)
        return alive
    bits = bits_row(state, -1 - storage)
    for word_index in range(state[BIT_WORDS]):
        word = load64(bits + 8 * word_index)
        while word != ZERO:
            alive = start_slot(state, word_index * 64 + trailing_zeros(word), alive)
            word &= word - ONE
    return alive


@inlined
def leave_slot(state, slot, set_id, depth, levels):
    """A slot is not in the next block's set; returns 1 when its holder drops out."""
    row = load32(state[SLOT_HOLDER] + 4 * slot)
    if row < 0:
        return 0
    level = load32(state[NEED] + 4 * row)
    if level == TIERS:
        return 0
    tier = np.int64(0)
    while tier < TIERS:
        other = load32(state[HOLDER_SLOTS] + 4 * (row * TIERS + tier))
        if other >= 0 and contains(state, set_id, other):
            break
        tier += 1
    if tier <= level:
        return 0
    for lost in range(level, tier):
        save32(levels + 4 * (row * TIERS + lost), depth)
    save32(state[NEED] + 4 * row, tier)
    return 1 if tier == TIERS else 0


@inlined
def mark_members(state, set_id, bits, present):
    """Set or clear in ``bits`` the members of a set that is not stored as a bitset."""
    if set_id >= SINGLE:
        if present:
            set_bit(bits, set_id - SINGLE)
        else:
            clear_bit(bits, set_id - SINGLE)
        return
    record = record_of(state, set_id)
    row = small_row(state, np.int64(load64(record + STORAGE)))
    for i in range(np.int64(load64(record + MEMBERS))):
        if present:
            set_bit(bits, load32(row + 4 * i))
        else:
            clear_bit(bits, load32(row + 4 * i))


@inlined
def bits_of(state, set_id):
    """Address of the set's bitset, 0 when it is stored otherwise."""
    if set_id >= SINGLE:
        return np.int64(0)
    storage = np.int64(load64(record_of(state, set_id) + STORAGE))
    if storage < 0:
        return bits_row(state, -1 - storage)
    return np.int64(0)


@inlined
def change_set(state, previous, current, depth, levels):
    """Handle every slot of ``previous`` that ``current`` lacks; returns how many holders drop out."""
    out = 0
    if previous >= SINGLE:
        if not contains(state, current, previous - SINGLE):
            out = leave_slot(state, previous - SINGLE, current, depth, levels)
        return out
    before = bits_of(state, previous)
    if before == 0:
        record = record_of(state, previous)
        row = small_row(state, np.int64(load64(record + STORAGE)))
        for i in range(np.int64(load64(record + MEMBERS))):
            slot = load32(row + 4 * i)
            if not contains(state, current, slot):
                out += leave_slot(state, slot, current, depth, levels)
        return out
    after = bits_of(state, current)
    marked = after == 0
    if marked:
        after = state[SCRATCH_BITS]
        mark_members(state, current, after, True)
    for word_index in range(state[BIT_WORDS]):
        word = load64(before + 8 * word_index) & ~load64(after + 8 * word_index)
        while word != ZERO:
            slot = word_index * 64 + trailing_zeros(word)
            word &= word - ONE
            out += leave_slot(state, slot, current, depth, levels)
    if marked:
        mark_members(state, current, after, False)
    return out


@inlined
def write_survivors(state, listed, depth, levels):
    """Give ``depth`` to the levels that are still alive, and leave NEED as it was."""
    both = (u64(depth) << u64(32)) | u64(depth)
    for i in range(listed):
        row = load32(state[ALIVE] + 4 * i)
        need = state[NEED] + 4 * row
        level = load32(need)
        target = levels + 4 * TIERS * row
        if level == 0:
            save64(target, both)
            save64(target + 8, both)
            save32(target + 16, depth)
        else:
            for each in range(level, TIERS):
                save32(target + 4 * each, depth)
        save32(need, TIERS)
