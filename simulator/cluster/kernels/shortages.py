"""How much one step can cause at most, and which arrays are too small for it."""

# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from cache_index.kernel_set import subroutine
from simulator.cluster.kernels import arrays as a
from simulator.cluster.kernels.layout import (
    C_BLOCK_TOKENS,
    C_EVENTS,
    C_FLOWS,
    C_NOTICES,
    C_SEGMENTS,
    C_TIMERS,
    E_CHUNKS,
    E_DEVICE,
    E_LOG_SIZE,
    E_REFERRED,
    ENOUGH,
    L_WORK,
    P_START,
    P_STOP,
    S_IDLE,
    SHORT_OF_EVENTS,
    SHORT_OF_FLOWS,
    SHORT_OF_LOG,
    SHORT_OF_NOTICES,
    SHORT_OF_SEGMENTS,
    W_BLOCKS,
    W_COMMITTED,
    W_DONE,
)
from simulator.cluster.kernels.pace import forget_runs


@subroutine
def events_of_commit(state, work, tokens):
    """Events that referring to the first ``tokens`` tokens of a prompt can cause at most."""
    row = a.work(state)[work]
    blocks = min(tokens // a.counters(state)[C_BLOCK_TOKENS], row[W_BLOCKS]) - row[W_COMMITTED]
    copies = 2 + a.pools(state).shape[1]
    return max(blocks, 0) * (1 + 2 * copies)  # each copy may drive another block out


@subroutine
def events_of_begin(state, engine):
    """Events that beginning a run can cause at most: blocks of the device that go."""
    return a.stores(state)[a.engines(state)[engine, E_DEVICE], S_IDLE] + a.engines(state)[engine, E_REFERRED]


@subroutine
def events_of_finish(state, engine):
    """Events that the end of a run can cause at most."""
    events = 0
    for place in range(a.engines(state)[engine, E_CHUNKS]):
        work = a.chunk_work(state)[engine, place]
        done = a.work(state)[work, W_DONE] + a.chunk_tokens(state)[engine, place]
        events += events_of_commit(state, work, done)
    return events


@subroutine
def shortage(state, engine, events):
    """What has to be made larger before an engine goes on, which causes at most so many events."""
    counters = a.counters(state)
    most = a.prefilling(state).shape[1]
    flows = (4 + a.pools(state).shape[1]) * most  # of each request in a batch: a load per source, a hand-off
    if counters[C_EVENTS] + events > a.events(state).shape[0]:
        return SHORT_OF_EVENTS
    if counters[C_NOTICES] + 2 * most > a.notices(state).shape[0]:
        return SHORT_OF_NOTICES
    if (
        counters[C_FLOWS] + flows > a.flows(state).shape[0]
        or counters[C_TIMERS] + most > a.timers(state).shape[0]
    ):
        return SHORT_OF_FLOWS
    if counters[C_SEGMENTS] + most > a.segments(state).shape[0]:
        return SHORT_OF_SEGMENTS
    if a.engines(state)[engine, E_LOG_SIZE] + 1 > a.log_steps(state).shape[1]:
        forget_runs(state, engine)
        if 2 * a.engines(state)[engine, E_LOG_SIZE] > a.log_steps(state).shape[1]:
            return SHORT_OF_LOG
    return ENOUGH


@subroutine
def shortage_of_copy(state, flow):
    """What has to be made larger before a copy ends."""
    copy = a.copies(state)[-2 - a.flows(state)[flow, L_WORK]]
    counters = a.counters(state)
    if counters[C_EVENTS] + 2 * (copy[P_STOP] - copy[P_START]) > a.events(state).shape[0]:
        return SHORT_OF_EVENTS
    if counters[C_NOTICES] + 1 > a.notices(state).shape[0]:
        return SHORT_OF_NOTICES
    return ENOUGH
