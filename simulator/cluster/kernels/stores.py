"""Stores of blocks: who has which, and which goes first when room is needed.

One open-addressing table over (store, hash) for all stores. Blocks of a device that requests refer to are not in
its list of idle ones, least recently used first; nor are pinned ones of a slower tier or a pool. What changes is
noted per store, in order, until `drain` tells it.
"""

# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

import numpy as np

from cache_index.kernel_set import subroutine
from simulator.cluster.kernels import arrays as a
from simulator.cluster.kernels.layout import (
    C_EVENTS,
    C_FREE_EVENT,
    C_FREE_RESIDENCY,
    E_DEVICE,
    E_DISK,
    E_DISK_WRITE_BACK,
    E_HOST,
    E_REFERRED,
    NONE,
    R_NEXT,
    R_PREVIOUS,
    R_REFERENCES,
    R_STORE,
    S_CAPACITY,
    S_EVENTS,
    S_HEAD,
    S_IDLE,
    S_PINNED,
    S_TAIL,
    S_WRITTEN,
    V_FIRST,
    V_NEXT,
    V_START,
    V_STOP,
    V_STORED,
    WRITES_THROUGH,
)


@subroutine
def home(state, store, block_hash):
    """Where the search for a block begins."""
    word = block_hash ^ (np.uint64(store + 1) * np.uint64(0x9E3779B97F4A7C15))
    word = (word ^ (word >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)
    return np.int64(word >> np.uint64(20)) & (a.table(state).shape[0] - 1)


@subroutine
def find(state, store, block_hash):
    """The residency of a block in a store, NONE if it is not there."""
    mask = a.table(state).shape[0] - 1
    at = home(state, store, block_hash)
    while True:
        residency = a.table(state)[at]
        if residency == NONE:
            return NONE
        if (
            a.residency_hash(state)[residency] == block_hash
            and a.residencies(state)[residency, R_STORE] == store
        ):
            return residency
        at = (at + 1) & mask


@subroutine
def insert(state, store, block_hash, references):
    """A block that the store does not have; the caller puts it among the idle ones, or refers to it."""
    counters = a.counters(state)
    residency = counters[C_FREE_RESIDENCY]
    counters[C_FREE_RESIDENCY] = a.residencies(state)[residency, R_NEXT]
    a.residencies(state)[residency, R_STORE] = store
    a.residencies(state)[residency, R_REFERENCES] = references
    a.residency_hash(state)[residency] = block_hash
    mask = a.table(state).shape[0] - 1
    at = home(state, store, block_hash)
    while a.table(state)[at] != NONE:
        at = (at + 1) & mask
    a.table(state)[at] = residency
    return residency


@subroutine
def erase(state, residency):
    """Take a residency out of the table; what stands behind it moves up."""
    mask = a.table(state).shape[0] - 1
    at = home(state, a.residencies(state)[residency, R_STORE], a.residency_hash(state)[residency])
    while a.table(state)[at] != residency:
        at = (at + 1) & mask
    hole = at
    at = (at + 1) & mask
    while a.table(state)[at] != NONE:
        other = a.table(state)[at]
        wanted = home(state, a.residencies(state)[other, R_STORE], a.residency_hash(state)[other])
        if ((at - wanted) & mask) >= ((at - hole) & mask):
            a.table(state)[hole] = other
            hole = at
        at = (at + 1) & mask
    a.table(state)[hole] = NONE
    a.residencies(state)[residency, R_STORE] = NONE
    a.residencies(state)[residency, R_NEXT] = a.counters(state)[C_FREE_RESIDENCY]
    a.counters(state)[C_FREE_RESIDENCY] = residency


@subroutine
def to_idle(state, residency):
    """Put a residency last among those that nobody refers to."""
    store = a.residencies(state)[residency, R_STORE]
    tail = a.stores(state)[store, S_TAIL]
    a.residencies(state)[residency, R_PREVIOUS] = tail
    a.residencies(state)[residency, R_NEXT] = NONE
    if tail == NONE:
        a.stores(state)[store, S_HEAD] = residency
    else:
        a.residencies(state)[tail, R_NEXT] = residency
    a.stores(state)[store, S_TAIL] = residency
    a.stores(state)[store, S_IDLE] += 1


@subroutine
def from_idle(state, residency):
    """Take a residency from those that nobody refers to."""
    store = a.residencies(state)[residency, R_STORE]
    before, after = a.residencies(state)[residency, R_PREVIOUS], a.residencies(state)[residency, R_NEXT]
    if before == NONE:
        a.stores(state)[store, S_HEAD] = after
    else:
        a.residencies(state)[before, R_NEXT] = after
    if after == NONE:
        a.stores(state)[store, S_TAIL] = before
    else:
        a.residencies(state)[after, R_PREVIOUS] = before
    a.stores(state)[store, S_IDLE] -= 1


@subroutine
def new_event(state, store):
    """A row at the end of a store's events; the caller fills it."""
    event = a.counters(state)[C_FREE_EVENT]
    a.counters(state)[C_FREE_EVENT] = a.events(state)[event, V_NEXT]
    a.counters(state)[C_EVENTS] += 1
    a.events(state)[event, V_NEXT] = NONE
    tail = a.stores(state)[store, S_EVENTS + 1]
    if tail == NONE:
        a.stores(state)[store, S_EVENTS] = event
    else:
        a.events(state)[tail, V_NEXT] = event
    a.stores(state)[store, S_EVENTS + 1] = event
    return event


@subroutine
def note_stored(state, store, chain, position):
    """Block ``position`` of the chain whose hashes begin at ``chain`` was stored."""
    tail = a.stores(state)[store, S_EVENTS + 1]
    if tail != NONE:
        last = a.events(state)[tail]
        if last[V_STORED] == 1 and last[V_FIRST] == chain and last[V_STOP] == chain + position:
            last[V_STOP] += 1
            return
    event = a.events(state)[new_event(state, store)]
    event[V_STORED] = 1
    event[V_START], event[V_STOP] = chain + position, chain + position + 1
    event[V_FIRST] = chain


@subroutine
def note_removed(state, store, block_hash):
    event = a.events(state)[new_event(state, store)]
    event[V_STORED] = 0
    event[V_START] = np.int64(block_hash)


@subroutine
def evict(state, store):
    """Drop the least recently used block that nobody refers to."""
    residency = a.stores(state)[store, S_HEAD]
    block_hash = a.residency_hash(state)[residency]
    from_idle(state, residency)
    erase(state, residency)
    note_removed(state, store, block_hash)


@subroutine
def refresh(state, store, block_hash):
    """Make a block of a slower tier or a pool the one used last; whether it is there."""
    residency = find(state, store, block_hash)
    if residency == NONE:
        return False
    if a.residencies(state)[residency, R_REFERENCES] == 0:
        from_idle(state, residency)
        to_idle(state, residency)
    return True


@subroutine
def keep(state, store, chain, position):
    """A copy of a block for a slower tier or a pool; room is made as needed. False when all of it is pinned."""
    block_hash = a.hashes(state)[chain + position]
    if refresh(state, store, block_hash):
        return True
    row = a.stores(state)[store]
    if row[S_IDLE] + row[S_PINNED] >= row[S_CAPACITY]:
        if row[S_IDLE] == 0:
            return False
        evict(state, store)
    row[S_WRITTEN] += 1
    to_idle(state, insert(state, store, block_hash, 0))
    note_stored(state, store, chain, position)
    return True


@subroutine
def keep_copies(state, engine, chain, position):
    """Write a block that was just stored on the device through to the slower tiers and pools of its engine.

    The disk gets it at once too: it is larger than the host, so what the host drops is on it as long as it can be.
    Tiers that are written back get only what is handed down to them.
    """
    for tier in (E_HOST, E_DISK):
        store = a.engines(state)[engine, tier]
        back = tier == E_DISK and a.engines(state)[engine, E_DISK_WRITE_BACK] == 1
        if store != NONE and not back:
            keep(state, store, chain, position)
    first_pool = a.stores(state).shape[0] - a.pools(state).shape[1]
    for pool in range(a.pools(state).shape[1]):
        if a.pools(state)[engine, pool] == WRITES_THROUGH:
            keep(state, first_pool + pool, chain, position)


@subroutine
def refresh_copies(state, engine, chain, blocks):
    """The first blocks of a chain were used: of their copies, too, ends go before beginnings.

    Without this, a beginning that the device still has would be the first that slower tiers drop.
    """
    first_pool = a.stores(state).shape[0] - a.pools(state).shape[1]
    for position in range(blocks - 1, -1, -1):
        block_hash = a.hashes(state)[chain + position]
        for tier in (E_HOST, E_DISK):
            store = a.engines(state)[engine, tier]
            if store != NONE:
                refresh(state, store, block_hash)
        for pool in range(a.pools(state).shape[1]):
            if a.pools(state)[engine, pool] != 0:
                refresh(state, first_pool + pool, block_hash)


@subroutine
def commit(state, engine, chain, start, stop):
    """The engine refers to blocks ``start`` to ``stop`` of a chain, which are on its device from now on."""
    device = a.engines(state)[engine, E_DEVICE]
    for position in range(start, stop):
        residency = find(state, device, a.hashes(state)[chain + position])
        if residency == NONE:
            insert(state, device, a.hashes(state)[chain + position], 1)
            a.engines(state)[engine, E_REFERRED] += 1
            note_stored(state, device, chain, position)
            keep_copies(state, engine, chain, position)
        else:
            refer(state, engine, residency)


@subroutine
def refer(state, engine, residency):
    """One more refers to a block of the device."""
    if a.residencies(state)[residency, R_REFERENCES] == 0:
        from_idle(state, residency)
        a.engines(state)[engine, E_REFERRED] += 1
    a.residencies(state)[residency, R_REFERENCES] += 1


@subroutine
def let_go(state, engine, chain, blocks):
    """One less refers to the first blocks of a chain; ends of chains become idle before their beginnings."""
    device = a.engines(state)[engine, E_DEVICE]
    for position in range(blocks - 1, -1, -1):
        residency = find(state, device, a.hashes(state)[chain + position])
        a.residencies(state)[residency, R_REFERENCES] -= 1
        if a.residencies(state)[residency, R_REFERENCES] == 0:
            a.engines(state)[engine, E_REFERRED] -= 1
            to_idle(state, residency)


@subroutine
def clear(state, store):
    """Forget everything; nobody must refer to a block. The owner is gone, so nothing is told."""
    while a.stores(state)[store, S_HEAD] != NONE:
        residency = a.stores(state)[store, S_HEAD]
        from_idle(state, residency)
        erase(state, residency)
    while a.stores(state)[store, S_EVENTS] != NONE:
        event = a.stores(state)[store, S_EVENTS]
        a.stores(state)[store, S_EVENTS] = a.events(state)[event, V_NEXT]
        a.events(state)[event, V_NEXT] = a.counters(state)[C_FREE_EVENT]
        a.counters(state)[C_FREE_EVENT] = event
        a.counters(state)[C_EVENTS] -= 1
    a.stores(state)[store, S_EVENTS + 1] = NONE
