"""Requests that are given up, and engines that die."""

# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

import numpy as np
from numba import types

from cache_index.kernel_set import subroutine
from simulator.cluster.kernels import arrays as a
from simulator.cluster.kernels.admission import pause_decode, release
from simulator.cluster.kernels.batches import cut_short
from simulator.cluster.kernels.compilation import KERNELS
from simulator.cluster.kernels.copies import copy_needs, end_copy, unpin_all
from simulator.cluster.kernels.flows import end_flow
from simulator.cluster.kernels.layout import (
    ARRIVED,
    C_BLOCK_TOKENS,
    C_FLOWS,
    C_TIMERS,
    COPY,
    DECODING,
    DRAINING,
    E_ARRIVED,
    E_CHUNKS,
    E_CONTEXT,
    E_DECODING,
    E_DEVICE,
    E_DISK,
    E_HOST,
    E_LOADED,
    E_LOG_SIZE,
    E_LOOSE,
    E_PREFILLING,
    E_RESERVED,
    E_RUN_STEPS,
    E_SILENT,
    E_STEPS,
    E_WAITING,
    E_WANTS_KV,
    G_STAGE_FREE_S,
    HELD,
    L_GIVER,
    L_SOURCE,
    L_WORK,
    LINKS_PER_ENGINE,
    LOADED,
    LOADING,
    NONE,
    PREFILLING,
    UNBORN,
    W_BLOCKS,
    W_CACHED,
    W_COMMITTED,
    W_DONE,
    W_END_STEP,
    W_ENGINE,
    W_FROM,
    W_LOADS,
    W_NUMBER,
    W_OUTPUT,
    W_PARTNER,
    W_PREEMPTIONS,
    W_ROOM,
    W_STANDS,
    W_TARGET,
    WAITING,
    WANTS_KV,
)
from simulator.cluster.kernels.outcomes import NOBODY, free_work
from simulator.cluster.kernels.queues import (
    chunk_of,
    place_of,
    push_back,
    push_decode,
    remove_decode,
    remove_prefilling,
    set_end,
    touch,
    unlink,
)
from simulator.cluster.kernels.stores import clear
from simulator.cluster.kernels.timers import end_timer

_INT, _SECONDS = types.int64, types.float64


@subroutine
def end_flows_of(state, work, now_s):
    """Whatever was on its way to a leg is given up."""
    flow = 0
    while flow < a.counters(state)[C_FLOWS]:
        if a.flows(state)[flow, L_WORK] == work:
            end_flow(state, flow, now_s)
        else:
            flow += 1


@subroutine
def drop_decode(state, engine, work, now_s):
    """A decode stops with the step under way; its books are closed then."""
    works = a.decode_work(state)[engine]
    at = place_of(works, a.engines(state)[engine, E_DECODING], work)
    if a.engines(state)[engine, E_RUN_STEPS] == 0:
        pause_decode(state, engine, at)
        release(state, work)
        free_work(state, work)
        return
    cut_short(state, engine, now_s)
    row = a.work(state)[work]
    last_step = a.engines(state)[engine, E_STEPS] + a.engines(state)[engine, E_RUN_STEPS]
    row[W_OUTPUT] -= row[W_END_STEP] - last_step
    row[W_END_STEP] = last_step
    remove_decode(state, engine, at)
    push_decode(state, engine, work, last_step)


@subroutine
def drop_leg(state, work, now_s):
    row = a.work(state)[work]
    engine, stands = row[W_ENGINE], row[W_STANDS]
    row[W_NUMBER] = NOBODY
    if row[W_LOADS] > 0:
        row[W_LOADS] = 0
        row[W_BLOCKS] = row[W_COMMITTED]  # what was to come before the rest of its chain does not
    end_flows_of(state, work, now_s)
    touch(state, engine)
    if stands == DECODING:
        drop_decode(state, engine, work, now_s)
        return
    if stands == PREFILLING and chunk_of(state, engine, work) != NONE:
        row[W_TARGET] = min(row[W_TARGET], row[W_DONE] + chunk_tokens_of(state, engine, work))
        return  # it ends with the step under way
    if stands == DRAINING:
        return
    if stands == PREFILLING:
        remove_prefilling(state, engine, work)
    elif stands == WAITING:
        unlink(state, engine, E_WAITING, work)
    elif stands == WANTS_KV:
        unlink(state, engine, E_WANTS_KV, work)
    elif stands == LOADED:
        unlink(state, engine, E_LOADED, work)
        a.engines(state)[engine, E_RESERVED] -= 1
    elif stands == ARRIVED:
        unlink(state, engine, E_ARRIVED, work)
        a.engines(state)[engine, E_RESERVED] -= 1
    elif stands != HELD and stands != UNBORN:
        a.engines(state)[engine, E_RESERVED] -= 1
    release(state, work)
    free_work(state, work)


@subroutine
def chunk_tokens_of(state, engine, work):
    return a.chunk_tokens(state)[engine, chunk_of(state, engine, work)]


@KERNELS.kernel(_INT, _INT, _SECONDS)
def drop(state, work, now_s):
    """Give a request up, all of it; steps under way go on, and what they bring of it is ignored."""
    partner = a.work(state)[work, W_PARTNER]
    a.work(state)[work, W_PARTNER] = NONE
    if partner != NONE:
        a.work(state)[partner, W_PARTNER] = NONE
        drop_leg(state, partner, now_s)
    drop_leg(state, work, now_s)


@subroutine
def compute_instead(state, work, now_s):
    """What a leg was to load is lost with whoever had it: that part of its prompt has to be computed."""
    row = a.work(state)[work]
    end_flows_of(state, work, now_s)
    row[W_LOADS] = 0
    row[W_DONE] = row[W_COMMITTED] * a.counters(state)[C_BLOCK_TOKENS]
    if row[W_PREEMPTIONS] == 0:
        row[W_CACHED] = row[W_DONE]
        for source in range(5):
            row[W_FROM + source] = 0
    row[W_STANDS] = LOADED
    push_back(state, row[W_ENGINE], E_LOADED, work)
    touch(state, row[W_ENGINE])


@KERNELS.kernel(_INT, _INT, _SECONDS)
def kill(state, engine, now_s):
    """An engine dies with all that it has; requests that need it must have been dropped before.

    What others load from it beside their compute is taken to arrive.
    """
    row = a.engines(state)[engine]
    flow = 0
    while flow < a.counters(state)[C_FLOWS]:
        work = a.flows(state)[flow, L_WORK]
        from_engine = a.flows(state)[flow, L_GIVER] // LINKS_PER_ENGINE == engine
        if a.flows(state)[flow, L_SOURCE] == COPY:
            if copy_needs(state, flow, engine):
                end_copy(state, flow, now_s)
            else:
                flow += 1
        elif from_engine and a.work(state)[work, W_STANDS] == LOADING:
            compute_instead(state, work, now_s)
            flow = 0
        else:
            flow += 1
    for work in range(a.work(state).shape[0]):
        # A prefill leg whose KV cache was received has only its times left, for the end of the request.
        left = a.work(state)[work, W_STANDS] == HELD and a.work(state)[work, W_ROOM] == 0
        if a.work(state)[work, W_ENGINE] == engine and not left:
            release(state, work)
            free_work(state, work)
    timer = 0
    while timer < a.counters(state)[C_TIMERS]:
        if a.work(state)[a.timers(state)[timer], W_ENGINE] == NONE:
            end_timer(state, timer)
        else:
            timer += 1
    for tier in (E_DEVICE, E_HOST, E_DISK):
        if row[tier] != NONE:
            unpin_all(state, row[tier])
            clear(state, row[tier])
    for queue in (E_WAITING, E_WANTS_KV, E_ARRIVED, E_LOADED):
        row[queue] = row[queue + 1] = NONE
        row[queue + 2] = 0
    for column in (
        E_RUN_STEPS,
        E_CHUNKS,
        E_PREFILLING,
        E_DECODING,
        E_SILENT,
        E_RESERVED,
        E_CONTEXT,
        E_LOOSE,
        E_LOG_SIZE,
    ):
        row[column] = 0
    a.speeds(state)[engine, G_STAGE_FREE_S] = 0.0
    set_end(state, engine, np.inf)
