"""Prompts in the later stages of pipelines."""

# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

import numpy as np

from cache_index.kernel_set import subroutine
from simulator.cluster.kernels import arrays as a
from simulator.cluster.kernels.layout import C_TIMERS, NONE


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
