"""From programs to the index."""

# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="attr-defined"

from __future__ import annotations

import numpy as np
from numba import carray, types

from cache_index.kernel_set import inlined, outlined
from cache_index.kernels.layout import LINKS, NODE_BYTES, NODES, PREFETCH_AHEAD
from cache_index.kernels.machine_words import ZERO, load64, secret_at, u64, words_at
from cache_index.kernels.residencies import remove_linked, resolve, store
from cache_index.kernels.tables import find, prefetch_entry
from cache_index.kernels.xxh3 import hash_pair
from cache_index.wire_kernels.compilation import kernel
from cache_index.wire_kernels.layout import (
    APPLIED,
    BARE,
    BLOCKS,
    BUDGET,
    BUDGET_SPENT,
    CHAINED,
    CLEAR,
    CLEARING,
    COUNT,
    DOMAIN,
    DONE,
    DOUBTFUL,
    FETCHED,
    FINISHED,
    FORGET,
    FORGETTING,
    HAS_PARENT,
    HASHES,
    KIND,
    LEFT_OUT,
    LOOKAHEAD,
    NAMES,
    NO_ROOM,
    NO_SLOT,
    NOT_BARE,
    OPERATION,
    OPERATIONS,
    PARENT_NAME,
    PROGRAM,
    REMOVALS_AT_ONCE,
    REMOVE,
    ROW_WORDS,
    SEED,
    SLOTS,
    START,
    STORE,
    TIER,
    UNRESOLVED,
)


@inlined
def fetch_links(state, work, names, stop):
    """Ask for the links of the program's blocks before ``stop``, and some more."""
    stop = min(stop + LOOKAHEAD, work[BLOCKS])
    for i in range(work[FETCHED], stop):
        prefetch_entry(state, LINKS, names[i], 16)
    work[FETCHED] = max(work[FETCHED], stop)


@outlined
def chain(work, row, parent, state, names):
    """Turn an operation's local hashes into sequence hashes."""
    hashes = secret_at(work[HASHES] + 8 * row[START])
    seed, domain = u64(work[SEED]), u64(row[DOMAIN])
    previous = parent
    for block in range(row[COUNT]):
        if block > 0 or parent != ZERO:
            previous = hash_pair(previous, hashes[block], seed)
            hashes[block] = previous
        else:
            previous = hashes[block]
        if block < PREFETCH_AHEAD:
            prefetch_entry(state, NODES, previous ^ domain, NODE_BYTES)
    row[KIND] = CHAINED
    row[PARENT_NAME] = np.int64(parent)


@outlined
def chain_bare(address, work, row, parent, names):
    """As `chain`, for a bare store: see ``cache_index.extra_keys``. What is left out is taken off the row."""
    hashes = secret_at(work[HASHES] + 8 * row[START])
    seed, domain = u64(work[SEED]), u64(row[DOMAIN])
    previous = parent
    for block in range(row[COUNT]):
        known = resolve(address, names[row[START] + block])
        if known != ZERO:
            hashes[block] = known ^ domain
        elif row[BARE] == LEFT_OUT:
            work[UNRESOLVED] += row[COUNT] - block
            row[COUNT] = block
            break
        else:
            work[DOUBTFUL] |= np.int64(1) << row[TIER]
            if block > 0 or parent != ZERO:
                hashes[block] = hash_pair(previous, hashes[block], seed)
        previous = hashes[block]
    row[KIND] = CHAINED
    row[PARENT_NAME] = np.int64(parent)


@outlined
def run_removal(address, work, row, slot, names):
    """Go on with a removal as far as budget and room reach; returns the block reached."""
    state = words_at(address)
    stop = min(row[COUNT], work[DONE] + work[BUDGET])
    done = work[DONE]
    while done < stop:
        some = min(stop, done + REMOVALS_AT_ONCE)
        fetch_links(state, work, names, row[START] + some)
        for i in range(row[START] + done, row[START] + some):
            key = load64(find(state, LINKS, names[i], 16) + 8)
            prefetch_entry(state, NODES, key, NODE_BYTES)
        view = carray(secret_at(work[NAMES] + 8 * row[START]), (some,))
        reached, unknown = remove_linked(address, slot, view, done)
        work[UNRESOLVED] += unknown
        done = reached
        if reached < some:
            break
    return done


@kernel(types.int64, types.int64)
def run_program(address, work_address):
    """Apply operations until the budget is spent or the caller has to do something first.

    After NO_ROOM the caller makes room, after NO_SLOT it makes a slot for the tier of the next operation,
    after CLEARING and FORGETTING it clears that operation's tier and steps over it; then it calls again.
    """
    state, work = words_at(address), words_at(work_address)
    names = secret_at(work[NAMES])
    slots = words_at(work[SLOTS])
    while work[OPERATION] < work[OPERATIONS]:
        if work[BUDGET] <= 0:
            return BUDGET_SPENT
        row = words_at(work[PROGRAM] + 8 * ROW_WORDS * work[OPERATION])
        kind, count = row[KIND], row[COUNT]
        if kind == CLEAR:
            return CLEARING
        if kind == FORGET:
            return FORGETTING
        slot = slots[row[TIER]]
        reached = count
        if kind == REMOVE:
            if slot >= 0:
                reached = run_removal(address, work, row, slot, names)
        else:
            if kind == STORE:
                fetch_links(state, work, names, row[START] + count)
                parent = ZERO
                if row[HAS_PARENT] != 0:
                    parent = resolve(address, u64(row[PARENT_NAME]))
                    if parent == ZERO:
                        work[UNRESOLVED] += count
                        work[OPERATION] += 1
                        continue
                    parent ^= u64(row[DOMAIN])
                if row[BARE] == NOT_BARE:
                    chain(work, row, parent, state, names)
                else:
                    chain_bare(address, work, row, parent, names)
                    count = row[COUNT]
                    reached = count
            if slot < 0:
                return NO_SLOT
            stop = min(count, work[DONE] + work[BUDGET])
            hashes = carray(secret_at(work[HASHES] + 8 * row[START]), (stop,))
            view = carray(secret_at(work[NAMES] + 8 * row[START]), (stop,))
            parent = u64(row[PARENT_NAME])
            reached = store(address, slot, hashes, view, u64(row[DOMAIN]), parent, work[DONE])
        applied = reached - work[DONE]
        work[APPLIED] += applied
        work[BUDGET] -= applied
        if reached < count:
            work[DONE] = reached
            return BUDGET_SPENT if work[BUDGET] <= 0 else NO_ROOM
        work[DONE] = 0
        work[OPERATION] += 1
    return FINISHED
