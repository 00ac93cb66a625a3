"""Sets of slots: one of a single slot is ``SINGLE | slot``; others are interned and count their references.

An interned set is a sorted array of slots while small, a bitset when large, and is found by its Zobrist hash.
"""

# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

import numpy as np

from cache_index.kernel_set import inlined
from cache_index.kernels.layout import (
    BIT_WORDS,
    BITS_POOL,
    FREE,
    LIVE,
    MEMBERS,
    NEXT,
    PAIR_BYTES,
    REFERENCES,
    ROW_BYTES,
    ROWS,
    SET_POOL,
    SETS,
    SINGLE,
    SLOT_HOLDER,
    SMALL_AGAIN,
    SMALL_POOL,
    SMALL_SET,
    STORAGE,
    ZOBRIST,
)
from cache_index.kernels.machine_words import ONE, ZERO, load32, load64, save32, save64, trailing_zeros, u64
from cache_index.kernels.tables import GOLDEN, claim, erase, find, mix


@inlined
def zobrist(slot):
    return mix(u64(slot) * GOLDEN + u64(0x1234567))


@inlined
def allocate(state, pool):
    state[pool + LIVE] += 1
    row = state[pool + FREE]
    if row >= 0:
        state[pool + FREE] = np.int64(load64(state[pool + ROWS] + row * state[pool + ROW_BYTES]))
        return row
    row = state[pool + NEXT]
    state[pool + NEXT] = row + 1
    return row


@inlined
def free(state, pool, row):
    save64(state[pool + ROWS] + row * state[pool + ROW_BYTES], u64(state[pool + FREE]))
    state[pool + FREE] = row
    state[pool + LIVE] -= 1


@inlined
def record_of(state, set_id):
    return state[SET_POOL + ROWS] + set_id * 32


@inlined
def members_of(state, set_id):
    if set_id >= SINGLE:
        return np.int64(1)
    return np.int64(load64(record_of(state, set_id) + MEMBERS))


@inlined
def zobrist_of(state, set_id):
    if set_id >= SINGLE:
        return zobrist(set_id - SINGLE)
    return load64(record_of(state, set_id) + ZOBRIST)


@inlined
def small_row(state, row):
    return state[SMALL_POOL + ROWS] + row * (SMALL_SET * 4)


@inlined
def bits_row(state, row):
    return state[BITS_POOL + ROWS] + row * state[BITS_POOL + ROW_BYTES]


@inlined
def set_bit(bits, slot):
    address = bits + (slot >> 6) * 8
    save64(address, load64(address) | (ONE << u64(slot & 63)))


@inlined
def clear_bit(bits, slot):
    address = bits + (slot >> 6) * 8
    save64(address, load64(address) & ~(ONE << u64(slot & 63)))


@inlined
def has_bit(bits, slot):
    return (load64(bits + (slot >> 6) * 8) >> u64(slot & 63)) & ONE != ZERO


@inlined
def contains(state, set_id, slot):
    if set_id >= SINGLE:
        return set_id == SINGLE + slot
    record = record_of(state, set_id)
    storage = np.int64(load64(record + STORAGE))
    if storage < 0:
        return has_bit(bits_row(state, -1 - storage), slot)
    row = small_row(state, storage)
    for i in range(np.int64(load64(record + MEMBERS))):
        member = load32(row + 4 * i)
        if member >= slot:
            return member == slot
    return False


@inlined
def retain(state, set_id):
    if 0 < set_id < SINGLE:
        address = record_of(state, set_id) + REFERENCES
        save64(address, load64(address) + ONE)


@inlined
def release(state, set_id):
    if set_id == 0 or set_id >= SINGLE:
        return
    record = record_of(state, set_id)
    references = load64(record + REFERENCES) - ONE
    save64(record + REFERENCES, references)
    if references != ZERO:
        return
    erase(state, SETS, find(state, SETS, load64(record + ZOBRIST), PAIR_BYTES), PAIR_BYTES)
    storage = np.int64(load64(record + STORAGE))
    if storage < 0:
        free(state, BITS_POOL, -1 - storage)
    else:
        free(state, SMALL_POOL, storage)
    free(state, SET_POOL, set_id)


@inlined
def new_set(state, hash_of_set, members, storage):
    set_id = allocate(state, SET_POOL)
    record = record_of(state, set_id)
    save64(record + ZOBRIST, hash_of_set)
    save64(record + REFERENCES, ZERO)
    save64(record + MEMBERS, u64(members))
    save64(record + STORAGE, u64(storage))
    entry = find(state, SETS, hash_of_set, PAIR_BYTES)
    save64(entry, hash_of_set)
    save64(entry + 8, u64(set_id))
    claim(state, SETS, entry, PAIR_BYTES)
    return set_id


@inlined
def copy_bits(state, source, target):
    for word in range(state[BIT_WORDS]):
        save64(target + 8 * word, load64(source + 8 * word))


@inlined
def zero_bits(state, bits):
    for word in range(state[BIT_WORDS]):
        save64(bits + 8 * word, ZERO)


@inlined
def with_slot(state, set_id, slot):
    """The interned set that has one slot more; it may be new and without references."""
    hash_of_set = zobrist_of(state, set_id) ^ zobrist(slot)
    known = np.int64(load64(find(state, SETS, hash_of_set, PAIR_BYTES) + 8))
    if known != 0:
        return known
    members = members_of(state, set_id)
    if set_id >= SINGLE:
        row = allocate(state, SMALL_POOL)
        target = small_row(state, row)
        save32(target, min(set_id - SINGLE, slot))
        save32(target + 4, max(set_id - SINGLE, slot))
        return new_set(state, hash_of_set, 2, row)
    storage = np.int64(load64(record_of(state, set_id) + STORAGE))
    if storage < 0:
        row = allocate(state, BITS_POOL)
        target = bits_row(state, row)
        copy_bits(state, bits_row(state, -1 - storage), target)
        set_bit(target, slot)
        return new_set(state, hash_of_set, members + 1, -1 - row)
    source = small_row(state, storage)
    if members == SMALL_SET:
        row = allocate(state, BITS_POOL)
        target = bits_row(state, row)
        zero_bits(state, target)
        for i in range(members):
            set_bit(target, load32(source + 4 * i))
        set_bit(target, slot)
        return new_set(state, hash_of_set, members + 1, -1 - row)
    row = allocate(state, SMALL_POOL)
    target = small_row(state, row)
    i = 0
    while i < members and load32(source + 4 * i) < slot:
        save32(target + 4 * i, load32(source + 4 * i))
        i += 1
    save32(target + 4 * i, slot)
    while i < members:
        save32(target + 4 * i + 4, load32(source + 4 * i))
        i += 1
    return new_set(state, hash_of_set, members + 1, row)


@inlined
def without_slot(state, set_id, slot):
    """The interned set that has one member less, 0 when nothing is left; see with_slot."""
    if set_id >= SINGLE:
        return np.int64(0)
    record = record_of(state, set_id)
    members = np.int64(load64(record + MEMBERS)) - 1
    storage = np.int64(load64(record + STORAGE))
    if members == 1:  # two members are always stored as an array
        row = small_row(state, storage)
        first = load32(row)
        return SINGLE + (load32(row + 4) if first == slot else first)
    hash_of_set = load64(record + ZOBRIST) ^ zobrist(slot)
    known = np.int64(load64(find(state, SETS, hash_of_set, PAIR_BYTES) + 8))
    if known != 0:
        return known
    if storage < 0 and members > SMALL_AGAIN:
        row = allocate(state, BITS_POOL)
        target = bits_row(state, row)
        copy_bits(state, bits_row(state, -1 - storage), target)
        clear_bit(target, slot)
        return new_set(state, hash_of_set, members, -1 - row)
    row = allocate(state, SMALL_POOL)
    target = small_row(state, row)
    if storage >= 0:
        source = small_row(state, storage)
        for i in range(members + 1):
            member = load32(source + 4 * i)
            if member != slot:
                save32(target, member)
                target += 4
        return new_set(state, hash_of_set, members, row)
    bits = bits_row(state, -1 - storage)
    for word_index in range(state[BIT_WORDS]):
        word = load64(bits + 8 * word_index)
        while word != ZERO:
            member = word_index * 64 + trailing_zeros(word)
            word &= word - ONE
            if member != slot:
                save32(target, member)
                target += 4
    return new_set(state, hash_of_set, members, row)


@inlined
def next_member(state, set_id, slot):
    """The set's first member from ``slot`` on, -1 when there is none."""
    if set_id >= SINGLE:
        return set_id - SINGLE if set_id - SINGLE >= slot else np.int64(-1)
    record = record_of(state, set_id)
    storage = np.int64(load64(record + STORAGE))
    if storage >= 0:
        row = small_row(state, storage)
        for i in range(np.int64(load64(record + MEMBERS))):
            if load32(row + 4 * i) >= slot:
                return load32(row + 4 * i)
        return np.int64(-1)
    bits = bits_row(state, -1 - storage)
    word_index = slot >> 6
    if word_index >= state[BIT_WORDS]:
        return np.int64(-1)
    word = load64(bits + 8 * word_index) & (~ZERO << u64(slot & 63))
    while word == ZERO:
        word_index += 1
        if word_index >= state[BIT_WORDS]:
            return np.int64(-1)
        word = load64(bits + 8 * word_index)
    return word_index * 64 + trailing_zeros(word)


@inlined
def is_live(state, slot):
    return load32(state[SLOT_HOLDER] + 4 * slot) >= 0
