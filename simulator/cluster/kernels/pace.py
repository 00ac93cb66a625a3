"""Durations of an engine's steps, in runs, and what they were to one request: its gaps between tokens."""

# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

import math

import numpy as np

from cache_index.kernel_set import subroutine
from simulator.cluster.kernels import arrays as a
from simulator.cluster.kernels.layout import (
    C_FREE_SEGMENT,
    C_SEGMENTS,
    E_LOG_FORGOTTEN,
    E_LOG_SIZE,
    E_SEALED,
    F_FIRST_S,
    NONE,
    UNBORN,
    W_ENGINE,
    W_LOG_START,
    W_SEGMENT,
    W_STANDS,
)

_SAME_RUN = 1e-12  # relative: what rounding makes of a step's duration
_FEW_RUNS = 32  # among which the longest steps are found faster by looking at all runs than at all steps


@subroutine
def log_end(state, engine):
    """Number of the run that comes next."""
    return a.engines(state)[engine, E_LOG_FORGOTTEN] + a.engines(state)[engine, E_LOG_SIZE]


@subroutine
def log_run(state, engine, steps, first_s, growth_s):
    """Note a run; one that goes on where the last one ended is the same run."""
    size = a.engines(state)[engine, E_LOG_SIZE]
    sealed = a.engines(state)[engine, E_SEALED] == 1
    if size > 0 and growth_s > 0.0 and not sealed and a.log_s(state)[engine, size - 1, 1] == growth_s:
        expected_s = a.log_s(state)[engine, size - 1, 0] + growth_s * a.log_steps(state)[engine, size - 1]
        if abs(first_s - expected_s) <= _SAME_RUN * expected_s:
            a.log_steps(state)[engine, size - 1] += steps
            return
    a.log_s(state)[engine, size, 0] = first_s
    a.log_s(state)[engine, size, 1] = growth_s
    a.log_steps(state)[engine, size] = steps
    a.engines(state)[engine, E_LOG_SIZE] += 1
    a.engines(state)[engine, E_SEALED] = 0


@subroutine
def begin_gaps(state, engine, work):
    """The request's gaps are those of the runs from here on."""
    a.work(state)[work, W_LOG_START] = log_end(state, engine)
    a.engines(state)[engine, E_SEALED] = 1


@subroutine
def first_needed(state, work):
    """The first run that a decoding request will ask for."""
    segment = a.work(state)[work, W_SEGMENT]
    first = (
        a.work(state)[work, W_LOG_START] if a.work_s(state)[work, F_FIRST_S] < np.inf else np.int64(1) << 62
    )
    while segment != NONE:
        first = min(first, a.segments(state)[segment, 0])
        segment = a.segments(state)[segment, 2]
    return first


@subroutine
def forget_runs(state, engine):
    """Drop runs that nobody will ask for."""
    first = log_end(state, engine)
    for work in range(a.work(state).shape[0]):
        if a.work(state)[work, W_ENGINE] == engine and a.work(state)[work, W_STANDS] != UNBORN:
            first = min(first, first_needed(state, work))
    gone = first - a.engines(state)[engine, E_LOG_FORGOTTEN]
    if gone <= 0:
        return
    size = a.engines(state)[engine, E_LOG_SIZE] - gone
    for at in range(size):
        a.log_s(state)[engine, at, 0] = a.log_s(state)[engine, at + gone, 0]
        a.log_s(state)[engine, at, 1] = a.log_s(state)[engine, at + gone, 1]
        a.log_steps(state)[engine, at] = a.log_steps(state)[engine, at + gone]
    a.engines(state)[engine, E_LOG_SIZE] = size
    a.engines(state)[engine, E_LOG_FORGOTTEN] = first


@subroutine
def begin_segment(state, engine, work, now_s):
    """The request stops decoding for a while, right after a token."""
    segment = a.counters(state)[C_FREE_SEGMENT]
    a.counters(state)[C_FREE_SEGMENT] = a.segments(state)[segment, 2]
    a.counters(state)[C_SEGMENTS] += 1
    a.segments(state)[segment, 0] = a.work(state)[work, W_LOG_START]
    a.segments(state)[segment, 1] = log_end(state, engine)
    a.segments(state)[segment, 2] = a.work(state)[work, W_SEGMENT]
    a.segment_gap_s(state)[segment] = now_s
    a.work(state)[work, W_SEGMENT] = segment
    a.engines(state)[engine, E_SEALED] = 1


@subroutine
def end_segment(state, work, now_s):
    """It said its next token."""
    segment = a.work(state)[work, W_SEGMENT]
    a.segment_gap_s(state)[segment] = now_s - a.segment_gap_s(state)[segment]


@subroutine
def free_segments(state, work):
    segment = a.work(state)[work, W_SEGMENT]
    while segment != NONE:
        after = a.segments(state)[segment, 2]
        a.segments(state)[segment, 2] = a.counters(state)[C_FREE_SEGMENT]
        a.counters(state)[C_FREE_SEGMENT] = segment
        a.counters(state)[C_SEGMENTS] -= 1
        segment = after
    a.work(state)[work, W_SEGMENT] = NONE


@subroutine
def write_gaps(state, engine, start, stop, count):
    """Append every step of some runs to the scratch; returns how many are in it."""
    forgotten = a.engines(state)[engine, E_LOG_FORGOTTEN]
    for run in range(start - forgotten, stop - forgotten):
        first_s, growth_s = a.log_s(state)[engine, run, 0], a.log_s(state)[engine, run, 1]
        for step in range(a.log_steps(state)[engine, run]):
            a.gaps_s(state)[count] = first_s + growth_s * step
            count += 1
    return count


@subroutine
def bring_longest_last(state, count, wanted):
    """Reorder the first ``count`` gaps: none is longer than any of the last ``wanted`` (Hoare's selection)."""
    gaps_s = a.gaps_s(state)
    low, high, border = 0, count - 1, count - wanted
    while low < high:
        pivot_s = gaps_s[(low + high) // 2]
        left, right = low, high
        while left <= right:
            while gaps_s[left] < pivot_s:
                left += 1
            while gaps_s[right] > pivot_s:
                right -= 1
            if left <= right:
                gaps_s[left], gaps_s[right] = gaps_s[right], gaps_s[left]
                left += 1
                right -= 1
        if right < border:
            low = left
        if left > border:
            high = right


@subroutine
def step_s(state, engine, run, step):
    """How long a step of a logged run took."""
    return a.log_s(state)[engine, run, 0] + a.log_s(state)[engine, run, 1] * step


@subroutine
def longest_of_runs_s(state, engine, start, stop, wanted):
    """The sum of the ``wanted`` longest steps of a few runs: in each of them the last ones are the longest."""
    runs = stop - start
    left, last_s = np.empty(runs, np.int64), np.empty(runs)
    for run in range(runs):
        left[run] = a.log_steps(state)[engine, start + run]
        last_s[run] = step_s(state, engine, start + run, left[run] - 1)
    total_s = 0.0
    for _ in range(wanted):
        longest = 0
        for run in range(1, runs):
            if last_s[run] > last_s[longest]:
                longest = run
        total_s += last_s[longest]
        left[longest] -= 1
        last_s[longest] = (
            step_s(state, engine, start + longest, left[longest] - 1) if left[longest] > 0 else -np.inf
        )
    return total_s


@subroutine
def longest_tenth_s(state, engine, work):
    """Mean of the longest tenth of a request's token gaps, of at least one (Mooncake, FAST'25, section 8.1)."""
    count = 0
    forgotten = a.engines(state)[engine, E_LOG_FORGOTTEN]
    start, stop = a.work(state)[work, W_LOG_START] - forgotten, log_end(state, engine) - forgotten
    if a.work(state)[work, W_SEGMENT] == NONE and stop - start <= _FEW_RUNS:
        for run in range(start, stop):
            count += a.log_steps(state)[engine, run]
        if count == 0:
            return 0.0
        tenth = np.int64(math.ceil(count / 10))
        return longest_of_runs_s(state, engine, start, stop, tenth) / tenth
    segment = a.work(state)[work, W_SEGMENT]
    while segment != NONE:
        count = write_gaps(state, engine, a.segments(state)[segment, 0], a.segments(state)[segment, 1], count)
        a.gaps_s(state)[count] = a.segment_gap_s(state)[segment]
        count += 1
        segment = a.segments(state)[segment, 2]
    count = write_gaps(state, engine, a.work(state)[work, W_LOG_START], log_end(state, engine), count)
    if count == 0:
        return 0.0
    tenth = np.int64(math.ceil(count / 10))
    bring_longest_last(state, count, tenth)
    total_s = 0.0
    for at in range(count - tenth, count):
        total_s += a.gaps_s(state)[at]
    return total_s / tenth
