"""Continuous batching: what each step of an engine holds, how long it takes, and what it brings about.

A step decodes a token of every running request and fills what the budget leaves with prompt chunks, first come,
first served. It takes ``max(base, prompts) + c1 * decodes + c2 * context``, where ``prompts`` are the prefill
terms of the class for the chunks in it: reading the weights hides behind the chunks' compute. Steps without chunks
grow evenly, by ``c2 * decodes`` each, hence ``k`` of them take ``k * first + growth * k * (k - 1) / 2``; they go on
until somebody's answer ends, or a cached block has to go, or something else happens to the engine.
"""

# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

import math

import numpy as np

from cache_index.kernel_set import subroutine
from simulator.cluster.kernels import arrays as a
from simulator.cluster.kernels.admission import (
    make_idle_fit,
    preempt_youngest,
    release,
    start_loads,
    take_room,
    used_tokens,
)
from simulator.cluster.kernels.flows import add_bytes, peer_flow
from simulator.cluster.kernels.layout import (
    ARRIVED,
    C_BLOCK_TOKENS,
    C_FLOWS,
    C_FREE_WORK,
    C_NOTICES,
    C_SINGLE_STEPS,
    C_TIMERS,
    COMPUTED,
    DECODING,
    DRAINING,
    E_ARRIVED,
    E_CHUNK_TOKENS,
    E_CHUNKS,
    E_COMPUTED,
    E_CONTEXT,
    E_DECODING,
    E_DEVICE,
    E_KV_TOKENS,
    E_LOADED,
    E_LOOSE,
    E_PREFILLING,
    E_RESERVED,
    E_RUN_STEPS,
    E_RUNS,
    E_SEQUENCES,
    E_SILENT,
    E_STAGES,
    E_STEPS,
    E_STREAMS,
    E_WAITING,
    E_WANTS_KV,
    F_BEGAN_S,
    F_FIRST_S,
    F_PREFILLED_S,
    F_READY,
    F_RECEIVED_S,
    FINISHED,
    FIRST_TOKEN,
    G_A,
    G_B,
    G_BASE,
    G_BUSY_S,
    G_D,
    G_DECODE_BASE,
    G_KV_BYTES,
    G_LAYERS,
    G_NIC_LATENCY_S,
    G_PER_CONTEXT,
    G_PER_SEQUENCE,
    G_RUN_FIRST_S,
    G_RUN_GROWTH_S,
    G_RUN_START_S,
    G_STAGE_FREE_S,
    HAND_OFF,
    HELD,
    L_MORE,
    L_SOURCE,
    L_WORK,
    LOADED,
    LOADING,
    N_BEGAN_S,
    N_CACHED,
    N_FIRST_S,
    N_FROM,
    N_ITL_S,
    N_KIND,
    N_NUMBER,
    N_PREEMPTIONS,
    N_PREFILLED_S,
    N_RECEIVED_S,
    N_TBT_S,
    N_WORK,
    NONE,
    PREFILL,
    PREFILLED,
    PREFILLING,
    RECEIVING,
    S_IDLE,
    UNBORN,
    W_BLOCKS,
    W_CACHED,
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
    W_PREEMPTIONS,
    W_PROMPT,
    W_ROOM,
    W_SAID,
    W_STANDS,
    W_STREAMS,
    W_TARGET,
    WANTS_KV,
)
from simulator.cluster.kernels.pace import (
    begin_gaps,
    begin_segment,
    end_segment,
    free_segments,
    log_run,
    longest_tenth_s,
)
from simulator.cluster.kernels.queues import (
    end_of,
    pop_front,
    push_back,
    push_decode,
    remove_decode,
    remove_prefilling,
    set_end,
    touch,
)
from simulator.cluster.kernels.stores import commit, refresh_copies

NOBODY = -1  # instead of the number of a request that was given up


@subroutine
def run_end_s(state, engine, steps):
    """When that many steps of the run have ended."""
    speeds = a.speeds(state)[engine]
    growth_s = speeds[G_RUN_GROWTH_S] * (steps * (steps - 1) / 2)
    return speeds[G_RUN_START_S] + steps * speeds[G_RUN_FIRST_S] + growth_s


@subroutine
def steps_until(state, engine, now_s):
    """The least number of steps of the run that end at ``now_s`` or later, at least one."""
    speeds, most = a.speeds(state)[engine], a.engines(state)[engine, E_RUN_STEPS]
    elapsed_s, half = now_s - speeds[G_RUN_START_S], speeds[G_RUN_GROWTH_S] / 2
    linear = speeds[G_RUN_FIRST_S] - half
    root = math.sqrt(linear * linear + 4 * half * max(elapsed_s, 0.0))
    steps = max(min(np.int64(math.ceil(2 * elapsed_s / (linear + root))), most), 1)
    # The root is exact but for rounding.
    while steps > 1 and run_end_s(state, engine, steps - 1) >= now_s:
        steps -= 1
    while steps < most and run_end_s(state, engine, steps) < now_s:
        steps += 1
    return steps


@subroutine
def running(state, engine):
    """Requests in the batch or on their way into it."""
    row = a.engines(state)[engine]
    return row[E_PREFILLING] + row[E_DECODING] + row[E_RESERVED]


@subroutine
def begin(state, engine, now_s):
    """Something changed for an engine: cut its run short, or begin another."""
    if a.engines(state)[engine, E_RUN_STEPS] == 0:
        receive_next(state, engine, now_s)
        next_run(state, engine, now_s)
    else:
        cut_short(state, engine, now_s)


@subroutine
def cut_short(state, engine, now_s):
    """Let a run end with the step under way."""
    if a.engines(state)[engine, E_RUN_STEPS] > 1:
        a.engines(state)[engine, E_RUN_STEPS] = steps_until(state, engine, now_s)
        set_end(state, engine, run_end_s(state, engine, a.engines(state)[engine, E_RUN_STEPS]))


@subroutine
def receive_next(state, engine, now_s):
    """Let decode legs that find room have their KV cache sent; those that were preempted go first."""
    row = a.engines(state)[engine]
    if row[E_WAITING] != NONE and a.work(state)[row[E_WAITING], W_PREEMPTIONS] > 0:
        return
    while row[E_WANTS_KV] != NONE and running(state, engine) < row[E_SEQUENCES]:
        work = row[E_WANTS_KV]
        if not take_room(state, work):
            break
        pop_front(state, engine, E_WANTS_KV)
        a.work(state)[work, W_STANDS] = RECEIVING
        row[E_RESERVED] += 1
        partner = a.work(state)[work, W_PARTNER]
        ended = a.work(state)[partner, W_STANDS] == HELD
        lacking = max(a.work_s(state)[partner, F_READY] - a.work(state)[work, W_CACHED], 0.0)
        peer_flow(
            state,
            work,
            HAND_OFF,
            a.work(state)[partner, W_ENGINE],
            engine,
            a.speeds(state)[engine, G_NIC_LATENCY_S],
            lacking * a.speeds(state)[engine, G_KV_BYTES],
            0 if ended else 1,
            now_s,
        )


@subroutine
def hand_off_of(state, decode):
    """The flow that brings a decode leg its KV cache; NONE before it has begun."""
    for flow in range(a.counters(state)[C_FLOWS]):
        if a.flows(state)[flow, L_WORK] == decode and a.flows(state)[flow, L_SOURCE] == HAND_OFF:
            return flow
    return NONE


@subroutine
def ready_to_send(state, prefill, tokens, now_s):
    """So many tokens of a prompt can be handed on now."""
    before, a.work_s(state)[prefill, F_READY] = a.work_s(state)[prefill, F_READY], tokens
    decode = a.work(state)[prefill, W_PARTNER]
    if (
        a.work(state)[prefill, W_STREAMS] == 0
        or decode == NONE
        or a.work(state)[decode, W_STANDS] != RECEIVING
    ):
        return
    flow = hand_off_of(state, decode)
    skipped = a.work(state)[decode, W_CACHED]
    added = max(tokens - skipped, 0.0) - max(before - skipped, 0.0)
    add_bytes(state, flow, added * a.speeds(state)[a.work(state)[decode, W_ENGINE], G_KV_BYTES], now_s)


@subroutine
def next_run(state, engine, now_s):
    """Form the next batch, if there is anything to compute."""
    row, speeds = a.engines(state)[engine], a.speeds(state)[engine]
    while row[E_ARRIVED] != NONE:
        work = pop_front(state, engine, E_ARRIVED)
        row[E_RESERVED] -= 1
        a.silent(state)[engine, row[E_SILENT]] = work
        row[E_SILENT] += 1
        start_decode(state, engine, work)
    preempted = False
    while not make_idle_fit(state, engine, row[E_DECODING]):
        if not preempt_youngest(state, engine, now_s):
            break
        preempted = True
    decodes = row[E_DECODING]
    decode_s = speeds[G_PER_SEQUENCE] * decodes + speeds[G_PER_CONTEXT] * row[E_CONTEXT]
    prompts_s = next_chunks(state, engine, row[E_CHUNK_TOKENS] - decodes, not preempted, now_s)
    speeds[G_RUN_START_S], speeds[G_RUN_GROWTH_S] = now_s, 0.0
    steps = 1
    if row[E_CHUNKS] > 0:
        speeds[G_RUN_FIRST_S] = (max(speeds[G_DECODE_BASE], prompts_s) + decode_s) / row[E_STAGES]
    elif decodes > 0:
        speeds[G_RUN_FIRST_S] = speeds[G_DECODE_BASE] + decode_s
        speeds[G_RUN_GROWTH_S] = speeds[G_PER_CONTEXT] * decodes
        # After a preemption, what waits may find room in the next step.
        if row[E_SILENT] == 0 and not preempted and a.counters(state)[C_SINGLE_STEPS] == 0:
            cached = a.stores(state)[row[E_DEVICE], S_IDLE] * a.counters(state)[C_BLOCK_TOKENS]
            free = row[E_KV_TOKENS] - used_tokens(state, engine) - cached
            steps = max(min(a.decode_end(state)[engine, 0] - row[E_STEPS], free // decodes), 1)
    else:
        return
    row[E_RUN_STEPS] = steps
    set_end(state, engine, run_end_s(state, engine, steps))


@subroutine
def next_chunks(state, engine, budget, admits, now_s):
    """Prompt chunks within a budget of tokens; returns the seconds that they take alone."""
    row, speeds = a.engines(state)[engine], a.speeds(state)[engine]
    seconds = 0.0
    row[E_CHUNKS] = 0
    place = 0
    while budget > 0:
        if place == row[E_PREFILLING]:
            work = next_prompt(state, engine, now_s) if admits else NONE
            if work == NONE:
                break
            seconds += speeds[G_BASE] + speeds[G_D] * a.work(state)[work, W_DONE]
        work = a.prefilling(state)[engine, place]
        done, target = a.work(state)[work, W_DONE], a.work(state)[work, W_TARGET]
        count = min(target - done, budget)
        seconds += speeds[G_A] * count + speeds[G_B] * count * (2 * done + count)
        a.chunk_work(state)[engine, place] = work
        a.chunk_tokens(state)[engine, place] = count
        row[E_CHUNKS] += 1
        budget -= count
        place += 1
        if a.work(state)[work, W_LEG] == PREFILL:
            sent = count * (1.0 - 1.0 / speeds[G_LAYERS]) if a.work(state)[work, W_STREAMS] == 1 else 0.0
            ready_to_send(state, work, done + sent, now_s)
    return seconds


@subroutine
def next_prompt(state, engine, now_s):
    """Begin another prefill; NONE when nothing waits, or what waits first has no room."""
    row = a.engines(state)[engine]
    while True:
        if row[E_LOADED] != NONE:
            work = pop_front(state, engine, E_LOADED)
            row[E_RESERVED] -= 1
            break
        if row[E_WAITING] == NONE or running(state, engine) >= row[E_SEQUENCES]:
            return NONE
        work = row[E_WAITING]
        if not take_room(state, work):
            return NONE
        pop_front(state, engine, E_WAITING)
        if a.work_s(state)[work, F_BEGAN_S] == np.inf:
            a.work_s(state)[work, F_BEGAN_S] = now_s
        if not start_loads(state, work, now_s) or row[E_STREAMS] == 1:
            break
        a.work(state)[work, W_STANDS] = LOADING
        row[E_RESERVED] += 1
    a.work(state)[work, W_STANDS] = PREFILLING
    a.prefilling(state)[engine, row[E_PREFILLING]] = work
    row[E_PREFILLING] += 1
    decode = a.work(state)[work, W_PARTNER]
    if a.work(state)[work, W_STREAMS] == 1 and a.work(state)[decode, W_STANDS] == UNBORN:
        want_kv(state, decode)
    return work


@subroutine
def want_kv(state, decode):
    """A decode leg begins to wait for room and its KV cache."""
    engine = a.work(state)[decode, W_ENGINE]
    a.work(state)[decode, W_STANDS] = WANTS_KV
    push_back(state, engine, E_WANTS_KV, decode)
    touch(state, engine)


@subroutine
def finish(state, engine):
    """The steps under way have ended."""
    row = a.engines(state)[engine]
    now_s, steps = end_of(state, engine), row[E_RUN_STEPS]
    speeds = a.speeds(state)[engine]
    speeds[G_BUSY_S] += now_s - speeds[G_RUN_START_S]
    row[E_RUNS] += 1
    row[E_STEPS] += steps
    row[E_RUN_STEPS] = 0
    set_end(state, engine, np.inf)
    if row[E_DECODING] > 0:
        decoded(state, engine, steps, now_s)
    if row[E_STAGES] > 1:
        stage_s = now_s - speeds[G_RUN_START_S]
        through_s = now_s + (row[E_STAGES] - 1) * stage_s
        speeds[G_STAGE_FREE_S] = max(through_s, speeds[G_STAGE_FREE_S] + stage_s)
    for place in range(row[E_CHUNKS]):
        if a.chunk_work(state)[engine, place] != NONE:
            computed(
                state, engine, a.chunk_work(state)[engine, place], a.chunk_tokens(state)[engine, place], now_s
            )
    row[E_CHUNKS] = 0


@subroutine
def decoded(state, engine, steps, now_s):
    """Every decode of an engine said so many tokens."""
    row, speeds = a.engines(state)[engine], a.speeds(state)[engine]
    log_run(state, engine, steps, speeds[G_RUN_FIRST_S], speeds[G_RUN_GROWTH_S])
    row[E_CONTEXT] += steps * row[E_DECODING]
    row[E_LOOSE] += steps * row[E_DECODING]
    for place in range(row[E_SILENT]):
        work = a.silent(state)[engine, place]
        if a.work(state)[work, W_NUMBER] != NOBODY:
            speak_again(state, engine, work, now_s)
    row[E_SILENT] = 0
    while row[E_DECODING] > 0 and a.decode_end(state)[engine, 0] <= row[E_STEPS]:
        work = remove_decode(state, engine, 0)
        a.work(state)[work, W_ROOM] = a.work(state)[work, W_PROMPT] + a.work(state)[work, W_OUTPUT]
        row[E_CONTEXT] -= a.work(state)[work, W_ROOM]
        end(state, engine, work, now_s)


@subroutine
def computed(state, engine, work, count, now_s):
    """A chunk of a prompt is done."""
    row = a.work(state)[work]
    row[W_DONE] += count
    a.engines(state)[engine, E_COMPUTED] += count
    if row[W_LOADS] == 0:
        commit_done(state, engine, work)
    if row[W_LEG] == PREFILL:
        ready_to_send(state, work, np.float64(row[W_DONE]), now_s)
    if row[W_DONE] < row[W_TARGET]:
        return
    remove_prefilling(state, engine, work)
    if a.engines(state)[engine, E_STAGES] > 1:
        row[W_STANDS] = DRAINING
        a.engines(state)[engine, E_RESERVED] += 1
        a.timers(state)[a.counters(state)[C_TIMERS]] = work
        a.timer_s(state)[a.counters(state)[C_TIMERS]] = a.speeds(state)[engine, G_STAGE_FREE_S]
        a.counters(state)[C_TIMERS] += 1
    else:
        through(state, engine, work, now_s)


@subroutine
def through(state, engine, work, now_s):
    """A prompt is computed in all stages; what it loads beside that may not be here yet."""
    if a.work(state)[work, W_LOADS] > 0:
        a.work(state)[work, W_STANDS] = COMPUTED
        a.engines(state)[engine, E_RESERVED] += 1
    else:
        prefilled(state, engine, work, now_s)


@subroutine
def commit_done(state, engine, work):
    """Refer to the full blocks of what is computed or loaded."""
    row = a.work(state)[work]
    stop = min(row[W_DONE] // a.counters(state)[C_BLOCK_TOKENS], row[W_BLOCKS])
    if stop > row[W_COMMITTED]:
        commit(state, engine, row[W_HASHES], row[W_COMMITTED], stop)
        a.engines(state)[engine, E_LOOSE] -= (stop - row[W_COMMITTED]) * a.counters(state)[C_BLOCK_TOKENS]
        row[W_COMMITTED] = stop


@subroutine
def prefilled(state, engine, work, now_s):
    """A prompt is computed to its end, and all of its KV cache is here."""
    row = a.work(state)[work]
    refresh_copies(state, engine, row[W_HASHES], row[W_COMMITTED])
    if a.work_s(state)[work, F_PREFILLED_S] == np.inf:
        a.work_s(state)[work, F_PREFILLED_S] = now_s
    if row[W_NUMBER] == NOBODY:
        release(state, work)
        free_work(state, work)
    elif row[W_LEG] == PREFILL:
        row[W_STANDS] = HELD
        a.work_s(state)[work, F_READY] = row[W_PROMPT]
        flow = hand_off_of(state, row[W_PARTNER])
        if flow != NONE:
            a.flows(state)[flow, L_MORE] = 0
        notice(state, PREFILLED, work, now_s)
    else:
        speak_again(state, engine, work, now_s)
        row[W_SAID] += 1
        if row[W_SAID] == row[W_OUTPUT]:
            end(state, engine, work, now_s)
        elif a.engines(state)[engine, E_RUN_STEPS] == 0:
            start_decode(state, engine, work)
        else:  # what streamed beside its compute came within a step of others
            begin_segment(state, engine, work, now_s)
            row[W_STANDS] = ARRIVED
            a.engines(state)[engine, E_RESERVED] += 1
            push_back(state, engine, E_ARRIVED, work)


@subroutine
def start_decode(state, engine, work):
    """It says a token with every step from now on."""
    row = a.work(state)[work]
    row[W_STANDS] = DECODING
    row[W_END_STEP] = a.engines(state)[engine, E_STEPS] + row[W_OUTPUT] - row[W_SAID]
    push_decode(state, engine, work, row[W_END_STEP])
    a.engines(state)[engine, E_CONTEXT] += row[W_PROMPT] + row[W_SAID]


@subroutine
def speak_again(state, engine, work, now_s):
    """It said its first token, or the first one after a pause."""
    begin_gaps(state, engine, work)
    if a.work_s(state)[work, F_FIRST_S] < np.inf:
        end_segment(state, work, now_s)
        return
    a.work_s(state)[work, F_FIRST_S] = now_s
    notice(state, FIRST_TOKEN, work, now_s)


@subroutine
def end(state, engine, work, now_s):
    """Its answer is complete, or it was given up."""
    if a.work(state)[work, W_NUMBER] == NOBODY:
        release(state, work)
        free_work(state, work)
        return
    line = notice(state, FINISHED, work, now_s)
    first = a.work(state)[work, W_PARTNER] if a.work(state)[work, W_PARTNER] != NONE else work
    line[N_BEGAN_S] = a.work_s(state)[first, F_BEGAN_S]
    line[N_PREFILLED_S] = a.work_s(state)[first, F_PREFILLED_S]
    line[N_RECEIVED_S] = a.work_s(state)[work, F_RECEIVED_S]
    line[N_FIRST_S] = a.work_s(state)[work, F_FIRST_S]
    line[N_CACHED] = a.work(state)[first, W_CACHED]
    line[N_PREEMPTIONS] = a.work(state)[work, W_PREEMPTIONS]
    for source in range(5):
        line[N_FROM + source] = a.work(state)[first, W_FROM + source]
    gaps = a.work(state)[work, W_OUTPUT] - 1
    line[N_ITL_S] = (now_s - a.work_s(state)[work, F_FIRST_S]) / gaps if gaps > 0 else 0.0
    line[N_TBT_S] = longest_tenth_s(state, engine, work) if gaps > 0 else 0.0
    release(state, work)
    if first != work:
        free_work(state, first)
    free_work(state, work)


@subroutine
def notice(state, kind, work, now_s):
    """A line for whoever drives the cluster."""
    line = a.notices(state)[a.counters(state)[C_NOTICES]]
    a.counters(state)[C_NOTICES] += 1
    line[N_KIND], line[N_WORK], line[N_NUMBER] = kind, work, a.work(state)[work, W_NUMBER]
    return line


@subroutine
def free_work(state, work):
    free_segments(state, work)
    a.work(state)[work, W_STANDS] = UNBORN
    a.work(state)[work, W_ENGINE] = NONE
    a.work(state)[work, W_NEXT] = a.counters(state)[C_FREE_WORK]
    a.counters(state)[C_FREE_WORK] = work


@subroutine
def loaded(state, work, now_s):
    """One of the flows that a prefill waits for has come through."""
    row = a.work(state)[work]
    engine = row[W_ENGINE]
    row[W_LOADS] -= 1
    if row[W_LOADS] > 0:
        return
    commit_done(state, engine, work)
    touch(state, engine)  # others may find these blocks
    if row[W_STANDS] == LOADING:
        row[W_STANDS] = LOADED
        push_back(state, engine, E_LOADED, work)
    elif row[W_STANDS] == COMPUTED:
        a.engines(state)[engine, E_RESERVED] -= 1
        prefilled(state, engine, work, now_s)


@subroutine
def received(state, decode, now_s):
    """A decode leg has its KV cache; the prefill leg's room is free."""
    row = a.work(state)[decode]
    prefill = row[W_PARTNER]
    release(state, prefill)
    touch(state, a.work(state)[prefill, W_ENGINE])
    engine = row[W_ENGINE]
    a.work_s(state)[decode, F_RECEIVED_S] = now_s
    row[W_DONE] = row[W_PROMPT]
    commit_done(state, engine, decode)
    refresh_copies(state, engine, row[W_HASHES], row[W_COMMITTED])
    row[W_STANDS] = ARRIVED
    push_back(state, engine, E_ARRIVED, decode)
    touch(state, engine)
