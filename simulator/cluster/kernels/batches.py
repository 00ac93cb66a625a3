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
    start_loads,
    take_room,
    used_tokens,
)
from simulator.cluster.kernels.flows import peer_flow
from simulator.cluster.kernels.hand_offs import ready_to_send, want_kv
from simulator.cluster.kernels.layout import (
    C_BLOCK_TOKENS,
    C_SINGLE_STEPS,
    DECODING,
    E_ARRIVED,
    E_CHUNK_TOKENS,
    E_CHUNKS,
    E_CONTEXT,
    E_DECODING,
    E_DEVICE,
    E_KV_TOKENS,
    E_LOADED,
    E_PREFILLING,
    E_RESERVED,
    E_RUN_STEPS,
    E_SEQUENCES,
    E_SILENT,
    E_STAGES,
    E_STEPS,
    E_STREAMS,
    E_WAITING,
    E_WANTS_KV,
    F_BEGAN_S,
    F_READY,
    G_A,
    G_B,
    G_BASE,
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
    HAND_OFF,
    HELD,
    LOADING,
    NONE,
    PREFILL,
    PREFILLING,
    RECEIVING,
    S_IDLE,
    UNBORN,
    W_CACHED,
    W_DONE,
    W_END_STEP,
    W_ENGINE,
    W_LEG,
    W_OUTPUT,
    W_PARTNER,
    W_PREEMPTIONS,
    W_PROMPT,
    W_SAID,
    W_STANDS,
    W_STREAMS,
    W_TARGET,
)
from simulator.cluster.kernels.queues import pop_front, push_decode, set_end


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
    # Nothing is begun in a step that preempted, unless that left it empty: then nothing would bring about the next.
    admits = not preempted or (decodes == 0 and row[E_PREFILLING] == 0)
    prompts_s = next_chunks(state, engine, row[E_CHUNK_TOKENS] - decodes, admits, now_s)
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
def start_decode(state, engine, work):
    """It says a token with every step from now on."""
    row = a.work(state)[work]
    row[W_STANDS] = DECODING
    row[W_END_STEP] = a.engines(state)[engine, E_STEPS] + row[W_OUTPUT] - row[W_SAID]
    push_decode(state, engine, work, row[W_END_STEP])
    a.engines(state)[engine, E_CONTEXT] += row[W_PROMPT] + row[W_SAID]
