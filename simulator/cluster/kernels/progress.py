"""What lets a simulated cluster go on: work is submitted, and time advances until something is to be told."""

# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

import numpy as np
from numba import types

from cache_index.kernel_set import subroutine
from simulator.cluster.kernels import arrays as a
from simulator.cluster.kernels.batches import begin
from simulator.cluster.kernels.compilation import KERNELS
from simulator.cluster.kernels.copies import copied
from simulator.cluster.kernels.flows import end_flow, next_flow, rest_flow
from simulator.cluster.kernels.hand_offs import want_kv
from simulator.cluster.kernels.layout import (
    C_ASKS,
    C_FREE_WORK,
    C_NOTICES,
    C_RESUMES,
    C_SHORT,
    C_TOUCHED,
    COPY,
    DECODE,
    E_RESERVED,
    E_TOUCHED,
    E_WAITING,
    ENOUGH,
    F_COLUMNS,
    F_READY,
    HAND_OFF,
    L_MORE,
    L_SOURCE,
    L_WORK,
    NONE,
    PREFILL,
    UNBORN,
    W_BLOCKS,
    W_COLUMNS,
    W_ENGINE,
    W_HASHES,
    W_LEG,
    W_NEXT,
    W_NUMBER,
    W_OUTPUT,
    W_PARTNER,
    W_PEER,
    W_PLAN,
    W_PROMPT,
    W_SEGMENT,
    W_STANDS,
    W_STREAMS,
    W_TARGET,
    WAITING,
    WHOLE,
)
from simulator.cluster.kernels.outcomes import finish, loaded, received, through
from simulator.cluster.kernels.queues import first_to_end, push_back, touch
from simulator.cluster.kernels.shortages import (
    events_of_begin,
    events_of_commit,
    events_of_finish,
    shortage,
    shortage_of_copy,
)
from simulator.cluster.kernels.timers import end_timer, next_timer

_INT, _SECONDS = types.int64, types.float64


@subroutine
def new_work(state, number, leg, engine, prompt_tokens, output_tokens, first_hash, blocks):
    """A row for a leg; there must be a free one."""
    work = a.counters(state)[C_FREE_WORK]
    row = a.work(state)[work]
    a.counters(state)[C_FREE_WORK] = row[W_NEXT]
    for column in range(W_COLUMNS):
        row[column] = 0
    row[W_NUMBER], row[W_LEG], row[W_ENGINE] = number, leg, engine
    row[W_STANDS] = UNBORN
    row[W_PROMPT], row[W_OUTPUT], row[W_TARGET] = prompt_tokens, output_tokens, prompt_tokens
    row[W_HASHES], row[W_BLOCKS] = first_hash, blocks
    row[W_PARTNER] = row[W_NEXT] = row[W_SEGMENT] = row[W_PEER] = NONE
    for column in range(F_COLUMNS):
        a.work_s(state)[work, column] = np.inf
    a.work_s(state)[work, F_READY] = 0.0
    return work


@KERNELS.kernel(*(11 * [_INT]), nogil=False)
def submit(
    state,
    number,
    engine,
    decode_engine,
    prompt_tokens,
    output_tokens,
    first_hash,
    blocks,
    plan_blocks,
    peer,
    streams,
):
    """Queue a request on an engine; ``decode_engine`` NONE: for all of it, else the one that decodes.

    Returns the row of its first leg, NONE when rows are short: make more, and submit again.
    """
    free = a.counters(state)[C_FREE_WORK]
    if free == NONE or a.work(state)[free, W_NEXT] == NONE:
        return NONE
    leg = PREFILL if decode_engine != NONE else WHOLE
    work = new_work(state, number, leg, engine, prompt_tokens, output_tokens, first_hash, blocks)
    row = a.work(state)[work]
    row[W_PLAN], row[W_PEER], row[W_STREAMS] = plan_blocks, peer, streams
    if decode_engine != NONE:
        decode = new_work(
            state, number, DECODE, decode_engine, prompt_tokens, output_tokens, first_hash, blocks
        )
        row[W_PARTNER] = decode
        a.work(state)[decode, W_PARTNER] = work
    row[W_STANDS] = WAITING
    push_back(state, engine, E_WAITING, work)
    touch(state, engine)
    return work


@KERNELS.kernel(_INT, _INT)
def hand_on(state, prefill):
    """The decode leg of a prefill that ended may begin."""
    decode = a.work(state)[prefill, W_PARTNER]
    if a.work(state)[decode, W_STANDS] == UNBORN:
        want_kv(state, decode)


@KERNELS.kernel(_INT, _SECONDS, _SECONDS, _INT, nogil=False)
def advance(state, now_s, until_s, patient):
    """Let time go on from ``now_s`` until something is to be told, or ``until_s``; returns when that is.

    The driver of a ``patient`` 1 is told first tokens and ends of answers, which want no answer, only with the next
    notice that does, when nothing is under way any more, or at ``until_s``.

    What happens at one time happens before engines that it concerns begin new steps: those are begun by the next
    call, after whatever its caller does at that time. With a shortage in ``C_SHORT`` the call is to be repeated,
    with the time that it returned, once arrays are larger; nothing has been lost.
    """
    counters = a.counters(state)
    if counters[C_SHORT] == ENOUGH:
        counters[C_NOTICES] = counters[C_ASKS] = 0
    resumes = counters[C_SHORT] != ENOUGH and counters[C_RESUMES] == 1
    counters[C_SHORT] = ENOUGH
    while True:
        if not resumes:
            while counters[C_TOUCHED] > 0:
                engine = a.touched(state)[counters[C_TOUCHED] - 1]
                counters[C_SHORT] = shortage(state, engine, events_of_begin(state, engine))
                if counters[C_SHORT] != ENOUGH:
                    counters[C_RESUMES] = 0
                    return now_s
                counters[C_TOUCHED] -= 1
                a.engines(state)[engine, E_TOUCHED] = 0
                begin(state, engine, now_s)
        resumes = False
        engine, end_s = first_to_end(state)
        flow, flow_s = next_flow(state)
        timer, timer_s = next_timer(state)
        at_s = min(end_s, min(flow_s, timer_s))
        if at_s == np.inf and counters[C_NOTICES] > 0:
            return now_s
        if at_s > until_s or at_s == np.inf:  # idle engines end at infinity, too
            return until_s
        now_s = max(now_s, at_s)
        while end_s <= now_s:
            counters[C_SHORT] = shortage(state, engine, events_of_finish(state, engine))
            if counters[C_SHORT] != ENOUGH:
                counters[C_RESUMES] = 1
                return now_s
            finish(state, engine)
            touch(state, engine)
            engine, end_s = first_to_end(state)
        while True:
            flow, flow_s = next_flow(state)
            if flow_s > now_s:
                break
            if a.flows(state)[flow, L_MORE] == 1:
                rest_flow(state, flow, now_s)
                continue
            work, source = a.flows(state)[flow, L_WORK], a.flows(state)[flow, L_SOURCE]
            if source == COPY:
                counters[C_SHORT] = shortage_of_copy(state, flow)
                if counters[C_SHORT] != ENOUGH:
                    counters[C_RESUMES] = 1
                    return now_s
                copied(state, flow, now_s)
                continue
            events = events_of_commit(state, work, a.work(state)[work, W_PROMPT])
            counters[C_SHORT] = shortage(state, a.work(state)[work, W_ENGINE], events)
            if counters[C_SHORT] != ENOUGH:
                counters[C_RESUMES] = 1
                return now_s
            end_flow(state, flow, now_s)
            if source == HAND_OFF:
                received(state, work, now_s)
            else:
                loaded(state, work, now_s)
        while True:
            timer, timer_s = next_timer(state)
            if timer_s > now_s:
                break
            work = a.timers(state)[timer]
            engine = a.work(state)[work, W_ENGINE]
            counters[C_SHORT] = shortage(state, engine, 0)
            if counters[C_SHORT] != ENOUGH:
                counters[C_RESUMES] = 1
                return now_s
            end_timer(state, timer)
            a.engines(state)[engine, E_RESERVED] -= 1
            touch(state, engine)
            through(state, engine, work, now_s)
        if now_s >= until_s or counters[C_ASKS] == 1 or (counters[C_NOTICES] > 0 and patient == 0):
            return now_s
