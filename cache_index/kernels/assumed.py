"""What one holder is assumed to have, in runs of blocks, the least recently used first.

A run is what is left of one assumption: those keys of its chain that no later run has, from the ``FIRST`` on. A
later run takes over what the two chains have in common, which is the beginning of both; what is evicted goes from
the end. So nothing is ever missing in the middle, and a run is found by the first key that it has left.

A *book* is an ``int64`` array like the index's state, whose memory the Python side owns (``assumed_runs.py``). The
keys of all runs stand one behind the other, older ones before newer ones.
"""

# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

import numpy as np
from numba import types
from numba.np.numpy_support import carray

from cache_index.kernel_set import inlined, outlined
from cache_index.kernels.changes import exchange
from cache_index.kernels.compilation import IN_U64, INTEGER, STATE, WORD, kernel
from cache_index.kernels.layout import CROWDED, NODE_BYTES, NODES, PAIR_BYTES, PREFETCH_AHEAD
from cache_index.kernels.machine_words import (
    ZERO,
    floats_at,
    load64,
    save64,
    secret_at,
    u64,
    words_at,
)
from cache_index.kernels.tables import claim, erase, find, prefetch_entry, prefetch_run
from cache_index.kernels.views import common_beginning

BEGINNINGS = 0  # table: first key that a run has left -> its row + 1
(
    ROWS_AT,
    FREE,  # a row that no run has, -1: none; the next one is its NEWER
    OLDEST,
    NEWEST,
    KEYS_AT,
    KEYS_SIZE,
    KEYS_END,  # what is behind it is free
    BLOCKS,  # of all runs
    MOST_BLOCKS,
    LOST_AT,  # keys that were evicted, in the order in which they are to be removed from the index
    TAKEN_AT,  # of the runs that the latest one took keys from: how far it got with each, and its number
    LOST_SIZE,  # of both
    TTL_S,  # as a float
) = range(10, 23)
BOOK_WORDS = 24

NUMBER, AT_S, FIRST, START, LENGTH, OLDER, NEWER = range(7)  # AT_S as a float
ROW_WORDS = 8

EXPIRED, NO_ROOM = -1, -2


@inlined
def row_at(book, row):
    return words_at(book[ROWS_AT] + 8 * ROW_WORDS * row)


@inlined
def key_at(book, position):
    return book[KEYS_AT] + 8 * position


@inlined
def name_run(book, row):
    """It is found by its first key from now on."""
    key = load64(key_at(book, row_at(book, row)[START]))
    entry = find(book, BEGINNINGS, key, PAIR_BYTES)
    save64(entry, key)
    save64(entry + 8, u64(row + 1))
    claim(book, BEGINNINGS, entry, PAIR_BYTES)


@inlined
def drop_run(book, row):
    """Whose name is gone."""
    run = row_at(book, row)
    older, newer = run[OLDER], run[NEWER]
    if older >= 0:
        row_at(book, older)[NEWER] = newer
    else:
        book[OLDEST] = newer
    if newer >= 0:
        row_at(book, newer)[OLDER] = older
    else:
        book[NEWEST] = older
    run[NEWER] = book[FREE]
    book[FREE] = row


@inlined
def take_over(book, start, blocks):
    """Take the first of the keys at ``start`` from the runs that have them; how many those are, and the runs.

    O(runs * log(blocks)): keys that are equal stand for equal beginnings.
    """
    chain = carray(secret_at(key_at(book, start)), (blocks,))
    taken = words_at(book[TAKEN_AT])
    position, runs = np.int64(0), np.int64(0)
    while position < blocks:
        entry = find(book, BEGINNINGS, chain[position], PAIR_BYTES)
        row = np.int64(load64(entry + 8)) - 1
        if row < 0:
            break
        run = row_at(book, row)
        if run[FIRST] != position:
            break
        theirs = carray(secret_at(key_at(book, run[START])), (run[LENGTH],))
        common = common_beginning(theirs, chain, position, 1)
        erase(book, BEGINNINGS, entry, PAIR_BYTES)
        position += common
        taken[2 * runs] = position
        taken[2 * runs + 1] = run[NUMBER]
        runs += 1
        if common < run[LENGTH]:
            run[FIRST] += common
            run[START] += common
            run[LENGTH] -= common
            name_run(book, row)
        else:
            drop_run(book, row)
    book[BLOCKS] -= position
    return position, runs


@inlined
def lose(book, blocks, lost):
    """Evict at most so many of the oldest run's last keys; returns how many are lost, with those before."""
    row = book[OLDEST]
    run = row_at(book, row)
    length = run[LENGTH]
    going = min(length, blocks)
    last, target = key_at(book, run[START] + length - 1), book[LOST_AT] + 8 * lost
    for i in range(going):
        save64(target + 8 * i, load64(last - 8 * i))
    if going < length:
        run[LENGTH] = length - going
    else:
        key = load64(key_at(book, run[START]))
        erase(book, BEGINNINGS, find(book, BEGINNINGS, key, PAIR_BYTES), PAIR_BYTES)
        drop_run(book, row)
    book[BLOCKS] -= going
    return lost + going


@outlined
def move_keys(book, target):
    """Close the gaps between the runs' keys; ``target`` is where they stand, or as large."""
    end = np.int64(0)
    row = book[OLDEST]
    while row >= 0:
        run = row_at(book, row)
        source = key_at(book, run[START])
        for i in range(run[LENGTH]):
            save64(target + 8 * (end + i), load64(source + 8 * i))
        run[START] = end
        end += run[LENGTH]
        row = run[NEWER]
    book[KEYS_AT] = target
    book[KEYS_END] = end


@inlined
def has_room(book, blocks):
    """For one run more, of so many blocks."""
    if book[FREE] < 0 or book[LOST_SIZE] < blocks or book[BEGINNINGS + CROWDED] != 0:
        return False
    if book[KEYS_END] + blocks > book[KEYS_SIZE]:
        # Not often: a third of the memory is free then.
        if 3 * (book[BLOCKS] + blocks) > 2 * book[KEYS_SIZE]:
            return False
        move_keys(book, book[KEYS_AT])
    return True


@kernel(STATE, STATE, INTEGER, IN_U64, WORD, INTEGER, types.float64, nogil=False)
def assume(book_address, address, slot, hashes, domain, number, now_s):
    """Begin a run of at most as many blocks as the holder may have, and tell the index what comes and goes.

    Returns from how many runs it took blocks, how many of those, how many are new and how many others lost, and how
    many of these two were told (`exchange`). Nothing was done where the first is ``EXPIRED``: the oldest run has to
    be dropped before, or ``NO_ROOM``.
    """
    book = words_at(book_address)
    blocks = min(hashes.shape[0], book[MOST_BLOCKS])
    none = np.int64(0)
    oldest = book[OLDEST]
    if oldest >= 0:
        at_s = floats_at(book[ROWS_AT] + 8 * (ROW_WORDS * oldest + AT_S))[0]
        if at_s + floats_at(book_address + 8 * TTL_S)[0] <= now_s:
            return np.int64(EXPIRED), none, none, none, none
    if not has_room(book, blocks):
        return np.int64(NO_ROOM), none, none, none, none
    start = book[KEYS_END]
    state = words_at(address)
    prefetch_entry(book, BEGINNINGS, hashes[0] ^ domain, PAIR_BYTES)
    for i in range(min(blocks, PREFETCH_AHEAD)):
        prefetch_run(state, NODES, hashes[i] ^ domain, NODE_BYTES)
    for i in range(blocks):
        save64(key_at(book, start + i), hashes[i] ^ domain)
    known, runs = take_over(book, start, blocks)
    lost, excess = none, book[BLOCKS] + blocks - book[MOST_BLOCKS]
    while lost < excess:
        lost = lose(book, excess - lost, lost)
    row = book[FREE]
    run = row_at(book, row)
    book[FREE] = run[NEWER]
    newest = book[NEWEST]
    if newest >= 0:
        row_at(book, newest)[NEWER] = row
    else:
        book[OLDEST] = row
    book[NEWEST] = row
    run[NUMBER], run[FIRST], run[START], run[LENGTH] = number, 0, start, blocks
    run[OLDER], run[NEWER] = newest, -1
    floats_at(book[ROWS_AT] + 8 * (ROW_WORDS * row + AT_S))[0] = now_s
    name_run(book, row)
    book[KEYS_END] = start + blocks
    book[BLOCKS] += blocks
    gone = carray(secret_at(book[LOST_AT]), (int(lost),))
    parent = hashes[known - 1] if known > 0 else ZERO
    done = exchange(address, slot, gone, hashes[known:blocks], domain, parent, 0)
    return runs, known, blocks - known, lost, done


@kernel(STATE, INTEGER, nogil=False)
def lose_last(book_address, blocks):
    """Evict at most so many of the oldest run's last keys, as many as can be told at once; returns how many."""
    book = words_at(book_address)
    return lose(book, min(blocks, book[LOST_SIZE]), np.int64(0))


@kernel(STATE, STATE, nogil=False)
def move_book(book_address, keys_address):
    """After its memory was changed: the runs' keys go to that address, and BEGINNINGS is written anew."""
    book = words_at(book_address)
    move_keys(book, keys_address)
    row = book[OLDEST]
    while row >= 0:
        name_run(book, row)
        row = row_at(book, row)[NEWER]
