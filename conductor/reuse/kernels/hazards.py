"""How likely a use is at every age, given none before: learned, mixed from coarse to fine; and what follows."""

# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from typing import Final

import numpy as np

from cache_index.kernel_set import inlined, outlined
from conductor.reuse.kernels.ages import age_bin, within_bin
from conductor.reuse.kernels.layout import AGE_BINS, AGE_EDGES_S, LEVELS, R_CELLS

# What is assumed of every age bin before anything was seen: a third is used again within an hour.
_ASSUMED: Final = 0.02
# Blocks of its own after which a cell weighs as much as the next coarser one.
_PRIOR_BLOCKS: Final = 5.0


@inlined
def count_reuse(learned, record, at):
    """A block of a record was used again, at an age of bin ``at``."""
    if at < AGE_BINS:
        for level in range(LEVELS):
            learned.reuses[record[R_CELLS + level], at] += 1.0


@inlined
def count_chance(learned, record, at, blocks, window):
    """Blocks of a record got to age bin ``at`` unused. Of a cell that has seen ``window``, half is forgotten."""
    for level in range(LEVELS):
        cell = record[R_CELLS + level]
        learned.chances[cell, at] += blocks
        if at == 0 and learned.chances[cell, 0] > window:
            learned.chances[cell] *= 0.5
            learned.reuses[cell] *= 0.5


@inlined
def hazard(learned, record, at):
    """The chance of a use within an age bin, of what got there."""
    chance = _ASSUMED
    for level in range(LEVELS):
        cell = record[R_CELLS + level]
        chances, reuses = learned.chances[cell, at], learned.reuses[cell, at]
        chance = (min(reuses, chances) + _PRIOR_BLOCKS * chance) / (chances + _PRIOR_BLOCKS)
    return chance


@outlined
def value_cell(learned, record):
    """Compute anew what blocks of a record's finest cell are worth at every age.

    That is Gittins' index: of all ages to keep a block to, the one with the most hits for each second that the
    block takes room.
    """
    cell = record[R_CELLS + LEVELS - 1]
    hits, room_s = np.empty(AGE_BINS), np.empty(AGE_BINS)
    left = 1.0
    for at in range(AGE_BINS):
        hits[at] = left * hazard(learned, record, at)
        room_s[at] = (left - 0.5 * hits[at]) * (AGE_EDGES_S[at + 1] - AGE_EDGES_S[at])
        left -= hits[at]
    # From the end: an age is best kept through to the next whose own rate is lower.
    following = np.empty(AGE_BINS, np.int64)
    for start in range(AGE_BINS - 1, -1, -1):
        after = start + 1
        while after < AGE_BINS and hits[after] * room_s[start] > hits[start] * room_s[after]:
            hits[start] += hits[after]
            room_s[start] += room_s[after]
            after = following[after]
        following[start] = after
        learned.values[cell, start] = hits[start] / room_s[start]


@outlined
def value(learned, record, age_s, now_s, refresh_s):
    """Hits a block-second of a record's blocks, computed anew when older than ``refresh_s``."""
    cell = record[R_CELLS + LEVELS - 1]
    if not now_s - learned.valued_s[cell] < refresh_s:
        value_cell(learned, record)
        learned.valued_s[cell] = now_s
    at = age_bin(age_s)
    if at == AGE_BINS:
        return 0.0
    after = learned.values[cell, at + 1] if at + 1 < AGE_BINS else 0.0
    share = within_bin(age_s, at)
    return (1.0 - share) * learned.values[cell, at] + share * after


@outlined
def probability(learned, record, age_s, until_s):
    """Of a use between two ages, given none up to the first."""
    left = 1.0
    for at in range(age_bin(age_s), AGE_BINS):
        if AGE_EDGES_S[at] >= until_s:
            break
        share = 1.0
        if at == age_bin(until_s):
            share = within_bin(until_s, at)
        if at == age_bin(age_s):
            share -= within_bin(age_s, at)
        left *= (1.0 - hazard(learned, record, at)) ** share
    return 1.0 - left
