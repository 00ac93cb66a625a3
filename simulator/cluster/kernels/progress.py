"""What the driver of a simulated cluster calls: submit work, let time go on, hear what became of it."""

# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
from numba import types

from cache_index.kernel_set import KernelSet, subroutine
from simulator.cluster.kernels import arrays as a
from simulator.cluster.kernels.admission import pause_decode, release, used_tokens
from simulator.cluster.kernels.flows import end_flow, next_flow, rest_flow
from simulator.cluster.kernels.layout import (
    ARRIVED,
    C_BLOCK_TOKENS,
    C_EVENTS,
    C_FLOWS,
    C_FREE_EVENT,
    C_FREE_WORK,
    C_NOTICES,
    C_RESUMES,
    C_SEGMENTS,
    C_SHORT,
    C_TIMERS,
    C_TOUCHED,
    DECODE,
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
    E_REFERRED,
    E_RESERVED,
    E_RUN_STEPS,
    E_SILENT,
    E_STEPS,
    E_TOUCHED,
    E_WAITING,
    E_WANTS_KV,
    ENOUGH,
    F_COLUMNS,
    F_READY,
    G_STAGE_FREE_S,
    HAND_OFF,
    HELD,
    L_GIVER,
    L_MORE,
    L_SOURCE,
    L_WORK,
    LINKS_PER_ENGINE,
    LOADED,
    LOADING,
    NONE,
    PREFILL,
    PREFILLING,
    S_EVENTS,
    S_IDLE,
    SHORT_OF_EVENTS,
    SHORT_OF_FLOWS,
    SHORT_OF_LOG,
    SHORT_OF_NOTICES,
    SHORT_OF_SEGMENTS,
    UNBORN,
    V_FIRST,
    V_NEXT,
    V_START,
    V_STOP,
    V_STORED,
    W_BLOCKS,
    W_CACHED,
    W_COLUMNS,
    W_COMMITTED,
    W_DONE,
    W_END_STEP,
    W_ENGINE,
    W_FROM,
    W_HASHES,
    W_LEG,
    W_LOADS,
    W_NEXT,
    W_NUMBER,
    W_OUTPUT,
    W_PARTNER,
    W_PEER,
    W_PLAN,
    W_PREEMPTIONS,
    W_PROMPT,
    W_ROOM,
    W_SEGMENT,
    W_STANDS,
    W_STREAMS,
    W_TARGET,
    WAITING,
    WANTS_KV,
    WHOLE,
)
from simulator.cluster.kernels.pace import forget_runs
from simulator.cluster.kernels.queues import (
    chunk_of,
    first_to_end,
    place_of,
    push_back,
    push_decode,
    remove_decode,
    remove_prefilling,
    set_end,
    touch,
    unlink,
)
from simulator.cluster.kernels.steps import (
    NOBODY,
    begin,
    cut_short,
    finish,
    free_work,
    loaded,
    received,
    run_end_s,
    running,
    steps_until,
    through,
    want_kv,
)
from simulator.cluster.kernels.stores import clear

KERNELS = KernelSet(*sorted(Path(__file__).parent.glob("*.py")))
_INT, _SECONDS = types.int64, types.float64


@cache
def compile_all() -> None:
    """Compile what follows, or load it from the cache; does nothing when called again."""
    KERNELS.compile_all()


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


@KERNELS.kernel(*(11 * [_INT]))
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
        if from_engine and a.work(state)[work, W_STANDS] == LOADING:
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


@subroutine
def end_timer(state, timer):
    a.counters(state)[C_TIMERS] -= 1
    for other in range(timer, a.counters(state)[C_TIMERS]):
        a.timers(state)[other] = a.timers(state)[other + 1]
        a.timer_s(state)[other] = a.timer_s(state)[other + 1]


@subroutine
def next_timer(state):
    first, end_s = NONE, np.inf
    for timer in range(a.counters(state)[C_TIMERS]):
        if a.timer_s(state)[timer] < end_s:
            first, end_s = timer, a.timer_s(state)[timer]
    return first, end_s


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


@KERNELS.kernel(_INT, _SECONDS, _SECONDS)
def advance(state, now_s, until_s):
    """Let time go on from ``now_s`` until something is to be told, or ``until_s``; returns when that is.

    What happens at one time happens before engines that it concerns begin new steps: those are begun by the next
    call, after whatever its caller does at that time. With a shortage in ``C_SHORT`` the call is to be repeated,
    with the time that it returned, once arrays are larger; nothing has been lost.
    """
    counters = a.counters(state)
    if counters[C_SHORT] == ENOUGH:
        counters[C_NOTICES] = 0
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
        if at_s > until_s:
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
        if counters[C_NOTICES] > 0 or now_s >= until_s:
            return now_s


@KERNELS.kernel(_INT, types.int64[:, ::1], types.uint64[::1])
def drain(state, changes, removed):
    """Write what stores have to tell into ``changes``, rows of (store, stored, start, stop, first).

    ``stored`` 1: the hashes from ``start`` to ``stop``, of a chain that begins at ``first``; 0: a range of
    ``removed``. In order for each store. Returns the number of rows.
    """
    rows, gone = 0, 0
    for store in range(a.stores(state).shape[0]):
        event = a.stores(state)[store, S_EVENTS]
        if event == NONE:
            continue
        last = NONE
        while event != NONE:
            row = a.events(state)[event]
            if row[V_STORED] == 1:
                changes[rows, 0], changes[rows, 1] = store, 1
                changes[rows, 2], changes[rows, 3], changes[rows, 4] = row[V_START], row[V_STOP], row[V_FIRST]
                rows += 1
                last = NONE
            else:
                if last == NONE:
                    last = rows
                    changes[rows, 0], changes[rows, 1], changes[rows, 2] = store, 0, gone
                    rows += 1
                removed[gone] = np.uint64(row[V_START])
                gone += 1
                changes[last, 3] = gone
            after = row[V_NEXT]
            row[V_NEXT] = a.counters(state)[C_FREE_EVENT]
            a.counters(state)[C_FREE_EVENT] = event
            event = after
        a.stores(state)[store, S_EVENTS] = a.stores(state)[store, S_EVENTS + 1] = NONE
    a.counters(state)[C_EVENTS] = 0
    return rows


@KERNELS.kernel(_INT, _SECONDS, types.float64[:, ::1])
def read_gauges(state, now_s, gauges):
    """Write [engine, (running, waiting, tokens taken)] as of now, within runs too."""
    for engine in range(a.engines(state).shape[0]):
        row = a.engines(state)[engine]
        gauges[engine, 0] = running(state, engine)
        gauges[engine, 1] = row[E_WAITING + 2] + row[E_WANTS_KV + 2]
        gauges[engine, 2] = used_tokens(state, engine)
        if row[E_RUN_STEPS] > 1:
            ended = steps_until(state, engine, now_s)
            if run_end_s(state, engine, ended) > now_s:
                ended -= 1
            gauges[engine, 2] += ended * row[E_DECODING]
