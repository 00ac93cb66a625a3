"""What a tier planner can have done: copies between stores that no request waits for, drops and pins."""

# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from numba import types

from cache_index.kernel_set import subroutine
from simulator.cluster.kernels import arrays as a
from simulator.cluster.kernels.compilation import KERNELS
from simulator.cluster.kernels.flows import end_flow, start_flow
from simulator.cluster.kernels.layout import (
    C_ASKS,
    C_BLOCK_TOKENS,
    C_EVENTS,
    C_FLOWS,
    C_FREE_COPY,
    C_NOTICES,
    COPIED,
    COPY,
    E_DEVICE,
    E_DISK,
    E_HOST,
    L_WORK,
    N_AT_S,
    N_CACHED,
    N_COLUMNS,
    N_KIND,
    N_NUMBER,
    NONE,
    P_HASHES,
    P_NEXT,
    P_NUMBER,
    P_SOURCE,
    P_START,
    P_STOP,
    P_TARGET,
    R_REFERENCES,
    R_STORE,
    S_PINNED,
)
from simulator.cluster.kernels.stores import erase, find, from_idle, keep, note_removed, refresh, to_idle

_INT, _SECONDS = types.int64, types.float64
NO_ROOM = -2  # make the arrays of flows and copies larger, and ask again


@KERNELS.kernel(*(9 * [_INT]), _SECONDS, _SECONDS, _SECONDS, _SECONDS)
def copy(
    state,
    number,
    source,
    target,
    first_hash,
    start,
    stop,
    links,
    coder,
    cap_bytes_per_s,
    latency_s,
    stored_bytes,
    now_s,
):
    """Begin to copy blocks of a chain to a host, a disk or a pool; its end is told by ``number``.

    Only what the source has from ``start`` on is copied, and only what the target has not takes time. ``links`` is
    the giver's in its upper half and the taker's in its lower, each plus one, 0 for none; ``coder`` a third, or
    `NONE`; ``stored_bytes`` are those of a token on the way. Returns how many blocks are to move, `NONE` when the
    source does not have the first, `NO_ROOM`.
    """
    counters = a.counters(state)
    free = counters[C_FREE_COPY]
    if free == NONE or counters[C_FLOWS] + 1 > a.flows(state).shape[0]:
        return NO_ROOM
    missing, position = 0, start
    while position < stop:
        block_hash = a.hashes(state)[first_hash + position]
        if find(state, source, block_hash) == NONE:
            break
        if find(state, target, block_hash) == NONE:
            missing += 1
        position += 1
    if position == start:
        return NONE
    row = a.copies(state)[free]
    counters[C_FREE_COPY] = row[P_NEXT]
    row[P_NUMBER], row[P_SOURCE], row[P_TARGET] = number, source, target
    row[P_HASHES], row[P_START], row[P_STOP] = first_hash, start, position
    left_bytes = missing * counters[C_BLOCK_TOKENS] * stored_bytes
    giver, taker = (links >> 32) - 1, (links & 0xFFFFFFFF) - 1
    start_flow(state, -2 - free, COPY, giver, taker, coder, cap_bytes_per_s, latency_s, left_bytes, 0, now_s)
    return missing


@subroutine
def end_copy(state, flow, now_s):
    """Take a copy's flow out, and its row."""
    row = -2 - a.flows(state)[flow, L_WORK]
    a.copies(state)[row, P_NEXT] = a.counters(state)[C_FREE_COPY]
    a.counters(state)[C_FREE_COPY] = row
    end_flow(state, flow, now_s)


@subroutine
def copied(state, flow, now_s):
    """A copy is through: the target has what the source still has of it."""
    copy = a.copies(state)[-2 - a.flows(state)[flow, L_WORK]]
    number, source, target = copy[P_NUMBER], copy[P_SOURCE], copy[P_TARGET]
    chain, start, stop = copy[P_HASHES], copy[P_START], copy[P_STOP]
    end_copy(state, flow, now_s)
    position = start
    while position < stop:
        if find(state, source, a.hashes(state)[chain + position]) == NONE or not keep(
            state, target, chain, position
        ):
            break
        position += 1
    for used in range(position - 1, start - 1, -1):  # ends go before beginnings
        refresh(state, target, a.hashes(state)[chain + used])
    notice = a.notices(state)[a.counters(state)[C_NOTICES]]
    a.counters(state)[C_NOTICES] += 1
    for column in range(N_COLUMNS):
        notice[column] = 0.0
    notice[N_KIND], notice[N_AT_S] = COPIED, now_s
    notice[N_NUMBER], notice[N_CACHED] = number, position - start
    a.counters(state)[C_ASKS] = 1


@subroutine
def copy_needs(state, flow, engine):
    """Whether a copy reads or writes something of an engine."""
    copy = a.copies(state)[-2 - a.flows(state)[flow, L_WORK]]
    for tier in (E_DEVICE, E_HOST, E_DISK):
        store = a.engines(state)[engine, tier]
        if store != NONE and (copy[P_SOURCE] == store or copy[P_TARGET] == store):
            return True
    return False


@KERNELS.kernel(*(5 * [_INT]))
def discard(state, store, first_hash, start, stop):
    """Drop blocks of a chain that nobody refers to; how many there were, `NO_ROOM` for too few rows of events."""
    if a.counters(state)[C_EVENTS] + stop - start > a.events(state).shape[0]:
        return NO_ROOM
    dropped = 0
    for position in range(stop - 1, start - 1, -1):
        block_hash = a.hashes(state)[first_hash + position]
        residency = find(state, store, block_hash)
        if residency != NONE and a.residencies(state)[residency, R_REFERENCES] == 0:
            from_idle(state, residency)
            erase(state, residency)
            note_removed(state, store, block_hash)
            dropped += 1
    return dropped


@KERNELS.kernel(*(5 * [_INT]))
def pin(state, store, first_hash, start, stop):
    """Keep blocks of a host, a disk or a pool until they are unpinned; how many are pinned of the range."""
    pinned = 0
    for position in range(start, stop):
        residency = find(state, store, a.hashes(state)[first_hash + position])
        if residency == NONE:
            continue
        if a.residencies(state)[residency, R_REFERENCES] == 0:
            from_idle(state, residency)
            a.residencies(state)[residency, R_REFERENCES] = 1
            a.stores(state)[store, S_PINNED] += 1
        pinned += 1
    return pinned


@KERNELS.kernel(*(5 * [_INT]))
def unpin(state, store, first_hash, start, stop):
    """Blocks of a range that were pinned may go again; how many."""
    unpinned = 0
    for position in range(stop - 1, start - 1, -1):
        residency = find(state, store, a.hashes(state)[first_hash + position])
        if residency != NONE and a.residencies(state)[residency, R_REFERENCES] > 0:
            let_pinned_go(state, residency)
            unpinned += 1
    return unpinned


@subroutine
def let_pinned_go(state, residency):
    a.residencies(state)[residency, R_REFERENCES] = 0
    a.stores(state)[a.residencies(state)[residency, R_STORE], S_PINNED] -= 1
    to_idle(state, residency)


@subroutine
def unpin_all(state, store):
    if a.stores(state)[store, S_PINNED] == 0:
        return
    for residency in range(a.residencies(state).shape[0]):
        pinned = a.residencies(state)[residency, R_REFERENCES] > 0
        if a.residencies(state)[residency, R_STORE] == store and pinned:
            let_pinned_go(state, residency)
