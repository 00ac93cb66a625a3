"""What steps, loads and hand-offs bring about when they end."""

# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

import numpy as np

from cache_index.kernel_set import subroutine
from simulator.cluster.kernels import arrays as a
from simulator.cluster.kernels.admission import release
from simulator.cluster.kernels.batches import start_decode
from simulator.cluster.kernels.hand_offs import hand_off_of, ready_to_send
from simulator.cluster.kernels.layout import (
    ARRIVED,
    C_ASKS,
    C_BLOCK_TOKENS,
    C_FREE_WORK,
    C_NOTICES,
    C_TIMERS,
    COMPUTED,
    DRAINING,
    E_ARRIVED,
    E_CHUNKS,
    E_COMPUTED,
    E_CONTEXT,
    E_DECODING,
    E_LOADED,
    E_LOOSE,
    E_RESERVED,
    E_RUN_STEPS,
    E_RUNS,
    E_SILENT,
    E_STAGES,
    E_STEPS,
    F_BEGAN_S,
    F_FIRST_S,
    F_PREFILLED_S,
    F_READY,
    F_RECEIVED_S,
    FINISHED,
    FIRST_TOKEN,
    G_BUSY_S,
    G_RUN_FIRST_S,
    G_RUN_GROWTH_S,
    G_RUN_START_S,
    G_STAGE_FREE_S,
    HELD,
    L_MORE,
    LOADED,
    LOADING,
    N_AT_S,
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
    NONE,
    PREFILL,
    PREFILLED,
    UNBORN,
    W_BLOCKS,
    W_CACHED,
    W_COMMITTED,
    W_DONE,
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
    W_TARGET,
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
    push_back,
    remove_decode,
    remove_prefilling,
    set_end,
    touch,
)
from simulator.cluster.kernels.stores import commit, refresh_copies

NOBODY = -1  # instead of the number of a request that was given up


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
    line[N_KIND], line[N_AT_S], line[N_NUMBER] = kind, now_s, a.work(state)[work, W_NUMBER]
    if kind == PREFILLED:
        a.counters(state)[C_ASKS] = 1
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
