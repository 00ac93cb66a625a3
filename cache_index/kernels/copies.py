"""Copies of one residency beyond the first."""

# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from cache_index.kernel_set import inlined
from cache_index.kernels.holder_sets import zobrist
from cache_index.kernels.layout import COPIES, MAX_EXTRA_COPIES, PAIR_BYTES, USED
from cache_index.kernels.machine_words import LOW_32, ONE, ZERO, load64, save64, u64
from cache_index.kernels.tables import claim, erase, find, mix


@inlined
def copy_key(key, slot):
    return mix(key + zobrist(slot))


@inlined
def add_copy(state, key, slot):
    mixed = copy_key(key, slot)
    entry = find(state, COPIES, mixed, PAIR_BYTES)
    value = load64(entry + 8)
    if value == ZERO:
        save64(entry, mixed)
        save64(entry + 8, (u64(slot) << u64(32)) | ONE)
        claim(state, COPIES, entry, PAIR_BYTES)
    elif (value & LOW_32) < u64(MAX_EXTRA_COPIES):
        save64(entry + 8, value + ONE)


@inlined
def drop_copy(state, key, slot):
    """Whether one of several copies went, so that the residency stays."""
    if state[COPIES + USED] == 0:
        return False
    entry = find(state, COPIES, copy_key(key, slot), PAIR_BYTES)
    value = load64(entry + 8)
    if value == ZERO:
        return False
    if value & LOW_32 == ONE:
        erase(state, COPIES, entry, PAIR_BYTES)
    else:
        save64(entry + 8, value - ONE)
    return True


@inlined
def drop_copies(state, key, slot):
    """Forget how many copies there are, so that the next removal takes the block away."""
    if state[COPIES + USED] != 0:
        entry = find(state, COPIES, copy_key(key, slot), PAIR_BYTES)
        if load64(entry + 8) != ZERO:
            erase(state, COPIES, entry, PAIR_BYTES)
