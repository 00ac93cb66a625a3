"""How much of a prompt every holder has."""

# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

import numpy as np

from cache_index.kernel_set import inlined, outlined
from cache_index.kernels.compilation import IN_U32, IN_U64, INTEGER, OUT_I32, OUT_U64, STATE, WORD, kernel
from cache_index.kernels.gaps import next_gap
from cache_index.kernels.heat import cool_down, warm_up
from cache_index.kernels.layout import CAREFUL, NODE_BYTES, NODES, PREFETCH_AHEAD, UNKNOWN
from cache_index.kernels.levels import change_set, start_set, write_survivors
from cache_index.kernels.machine_words import ZERO, load64, words_at
from cache_index.kernels.nodes import depth_of, entry_at, fits_at, set_of
from cache_index.kernels.tables import prefetch_entry
from cache_index.kernels.xxh3 import roll


@inlined
def step_through(state, hashes, domain, low, low_set, high, levels, alive):
    """Like halve, looking at each position."""
    while low < high and alive > 0:
        if low + PREFETCH_AHEAD < high:
            prefetch_entry(state, NODES, hashes[low + PREFETCH_AHEAD] ^ domain, NODE_BYTES)
        following = set_of(entry_at(state, hashes, domain, low + 1))
        if following == 0:
            return np.int64(0), low
        if following != low_set:
            alive -= change_set(state, low_set, following, low + 1, levels)
            if alive == 0:
                return alive, low
        low_set = following
        low += 1
    return alive, low


@outlined
def halve(state, hashes, domain, first, spans, levels, alive):
    """Handle in order all changes of the set within the span in ``spans[0:4]``.

    A span is (first position, its set, last position, its set), with sets that only shrink in between;
    ``first`` is the depth at position 0. Returns the holders still alive (0 also where nothing follows)
    and the last position that holders had.
    """
    top = 4
    position = spans[0]
    while top > 0 and alive > 0:
        top -= 4
        low, low_set, high, high_set = spans[top], spans[top + 1], spans[top + 2], spans[top + 3]
        position = low
        if low_set == high_set:
            position = high
            continue
        if high - low == 1:
            if high_set == 0:
                return np.int64(0), low
            alive -= change_set(state, low_set, high_set, high, levels)
            if alive > 0:
                position = high
            continue
        middle = (low + high) >> 1
        prefetch_entry(state, NODES, hashes[(low + middle) >> 1] ^ domain, NODE_BYTES)
        prefetch_entry(state, NODES, hashes[(middle + high) >> 1] ^ domain, NODE_BYTES)
        entry = entry_at(state, hashes, domain, middle)
        middle_set = set_of(entry)
        if middle_set != 0 and not fits_at(entry, first + middle):
            alive, position = step_through(state, hashes, domain, low, low_set, high, levels, alive)
            continue
        if middle_set != 0:  # otherwise nothing lives behind it
            spans[top], spans[top + 1], spans[top + 2], spans[top + 3] = middle, middle_set, high, high_set
            top += 4
        spans[top], spans[top + 1], spans[top + 2], spans[top + 3] = low, low_set, middle, middle_set
        top += 4
    return alive, position


@inlined
def follow(state, hashes, domain, entry, alive, levels, spans):
    """Walk along the prompt from the first block's ``entry`` while holders are alive.

    Jumps double as long as they meet no gap. A position at a gap, and CAREFUL positions before a node that
    is recorded at another depth, are passed one by one. Returns the last position that holders had.
    """
    last = hashes.shape[0] - 1
    position, jump = np.int64(0), np.int64(1)
    position_set, depth = set_of(entry), np.int64(depth_of(entry))
    first = depth  # at position 0, if each block lies one deeper than the one before
    clear_to = np.int64(0)  # no gap from the present position up to here
    careful_to = np.int64(0)
    while position < last and alive > 0:
        target = min(position + jump, last)
        if position < careful_to or depth == UNKNOWN:
            target = position + 1
            ahead = min(position + PREFETCH_AHEAD, last)
            prefetch_entry(state, NODES, hashes[ahead] ^ domain, NODE_BYTES)
        elif target > max(clear_to, position + 1):
            clear_to = next_gap(state, hashes, domain, first, max(position, clear_to), target)
            target = max(clear_to, position + 1)
        entry = entry_at(state, hashes, domain, target)
        target_set = set_of(entry)
        if target > position + 1 and target_set != 0 and not fits_at(entry, first + target):
            careful_to = position + CAREFUL
            continue
        if target_set == position_set:
            position = target
        else:
            spans[0], spans[1], spans[2], spans[3] = position, position_set, target, target_set
            alive, position = halve(state, hashes, domain, first, spans, levels, alive)
        position_set, depth = target_set, np.int64(depth_of(entry))
        if depth != first + position:
            first, clear_to, jump = depth - position, position, np.int64(1)
        jump = min(2 * jump, last)
    return position


@outlined
def match_chain(address, hashes, domain, levels):
    state = words_at(address)
    total = hashes.shape[0]
    if total == 0:
        return 0
    entry = entry_at(state, hashes, domain, 0)
    if load64(entry + 8) == ZERO:
        return 0
    ahead = 1
    while ahead < total:
        prefetch_entry(state, NODES, hashes[ahead] ^ domain, NODE_BYTES)
        ahead = 2 * ahead + 1
    prefetch_entry(state, NODES, hashes[total - 1] ^ domain, NODE_BYTES)
    listed = start_set(state, set_of(entry))
    if listed == 0:
        return 0
    spans = np.empty(4 * 64, np.int64)
    position = follow(state, hashes, domain, entry, listed, levels.ctypes.data, words_at(spans.ctypes.data))
    depth = position + 1
    write_survivors(state, listed, depth, levels.ctypes.data)
    warm_up(state, entry_at(state, hashes, domain, position))
    cool_down(state)
    return depth


@kernel(STATE, IN_U64, WORD, OUT_I32, nogil=False)
def match(address, hashes, domain, levels):
    """Contiguous prefix in blocks per (holder row, tier level) into ``levels``, which must be zero.

    Returns the number of blocks that some holder has. Keeps the GIL: waiting for it afterwards would take
    longer than the kernel.
    """
    return match_chain(address, hashes, domain, levels)


@kernel(STATE, IN_U32, INTEGER, WORD, STATE, IN_U64, IN_U64, WORD, OUT_U64, OUT_I32, nogil=False)
def match_tokens(address, tokens, block_size, seed, secrets, folds, known, domain, hashes, levels):
    """`hash_chain` of a whole prompt into ``hashes``, then `match`; ``secrets`` is where they are.

    ``known`` are the first of the hashes.
    """
    blocks = known.shape[0]
    parent = ZERO
    if blocks > 0:
        hashes[:blocks] = known
        parent = known[blocks - 1]
    roll(
        tokens.ctypes.data + 4 * block_size * blocks,
        block_size,
        seed,
        secrets,
        parent,
        folds[blocks:],
        hashes[blocks:],
    )
    return match_chain(address, hashes, domain, levels)
