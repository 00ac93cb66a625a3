"""Places where work waits: queues of an engine, the heap of its decodes, engines to look at, ends of runs."""

# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

import numpy as np

from cache_index.kernel_set import subroutine
from simulator.cluster.kernels import arrays as a
from simulator.cluster.kernels.layout import (
    C_TOUCHED,
    E_CHUNKS,
    E_DECODING,
    E_PREFILLING,
    E_TOUCHED,
    NONE,
    W_NEXT,
    W_NUMBER,
)


@subroutine
def push_back(state, engine, queue, work):
    tail = a.engines(state)[engine, queue + 1]
    a.work(state)[work, W_NEXT] = NONE
    if tail == NONE:
        a.engines(state)[engine, queue] = work
    else:
        a.work(state)[tail, W_NEXT] = work
    a.engines(state)[engine, queue + 1] = work
    a.engines(state)[engine, queue + 2] += 1


@subroutine
def push_front(state, engine, queue, work):
    head = a.engines(state)[engine, queue]
    a.work(state)[work, W_NEXT] = head
    a.engines(state)[engine, queue] = work
    if head == NONE:
        a.engines(state)[engine, queue + 1] = work
    a.engines(state)[engine, queue + 2] += 1


@subroutine
def pop_front(state, engine, queue):
    work = a.engines(state)[engine, queue]
    a.engines(state)[engine, queue] = a.work(state)[work, W_NEXT]
    if a.engines(state)[engine, queue] == NONE:
        a.engines(state)[engine, queue + 1] = NONE
    a.engines(state)[engine, queue + 2] -= 1
    return work


@subroutine
def unlink(state, engine, queue, work):
    """Take work out of the middle of a queue: linear in what stands before it."""
    before, at = NONE, a.engines(state)[engine, queue]
    while at != work:
        before, at = at, a.work(state)[at, W_NEXT]
    if before == NONE:
        pop_front(state, engine, queue)
        return
    a.work(state)[before, W_NEXT] = a.work(state)[work, W_NEXT]
    if a.engines(state)[engine, queue + 1] == work:
        a.engines(state)[engine, queue + 1] = before
    a.engines(state)[engine, queue + 2] -= 1


@subroutine
def touch(state, engine):
    """Something changed for an engine: it is looked at before time goes on."""
    if a.engines(state)[engine, E_TOUCHED] == 0:
        a.engines(state)[engine, E_TOUCHED] = 1
        a.touched(state)[a.counters(state)[C_TOUCHED]] = engine
        a.counters(state)[C_TOUCHED] += 1


@subroutine
def set_end(state, engine, end_s):
    """When the engine's run ends; infinity for none."""
    node = a.ends(state).shape[0] // 2 + engine
    a.ends(state)[node] = end_s
    node //= 2
    while node > 0:
        a.ends(state)[node] = min(a.ends(state)[2 * node], a.ends(state)[2 * node + 1])
        node //= 2


@subroutine
def end_of(state, engine):
    return a.ends(state)[a.ends(state).shape[0] // 2 + engine]


@subroutine
def first_to_end(state):
    """The engine whose run ends first, and when; of several the one with the least number."""
    end_s = a.ends(state)[1]
    node, leaves = 1, a.ends(state).shape[0] // 2
    while node < leaves:
        node = 2 * node if a.ends(state)[2 * node] == end_s else 2 * node + 1
    return node - leaves, end_s


@subroutine
def goes_before(state, ends, works, one, other):
    if ends[one] != ends[other]:
        return ends[one] < ends[other]
    return a.work(state)[works[one], W_NUMBER] < a.work(state)[works[other], W_NUMBER]


@subroutine
def swap(ends, works, one, other):
    ends[one], ends[other] = ends[other], ends[one]
    works[one], works[other] = works[other], works[one]


@subroutine
def sift_up(state, ends, works, at):
    while at > 0:
        above = (at - 1) // 2
        if not goes_before(state, ends, works, at, above):
            break
        swap(ends, works, at, above)
        at = above


@subroutine
def sift_down(state, ends, works, at, size):
    while True:
        least = at
        for below in (2 * at + 1, 2 * at + 2):
            if below < size and goes_before(state, ends, works, below, least):
                least = below
        if least == at:
            break
        swap(ends, works, at, least)
        at = least


@subroutine
def push_decode(state, engine, work, end_step):
    ends, works = a.decode_end(state)[engine], a.decode_work(state)[engine]
    size = a.engines(state)[engine, E_DECODING]
    ends[size], works[size] = end_step, work
    a.engines(state)[engine, E_DECODING] += 1
    sift_up(state, ends, works, size)


@subroutine
def remove_decode(state, engine, at):
    """Take the decode at a place of the heap out of it."""
    ends, works = a.decode_end(state)[engine], a.decode_work(state)[engine]
    a.engines(state)[engine, E_DECODING] -= 1
    last = a.engines(state)[engine, E_DECODING]
    work = works[at]
    if at != last:
        ends[at], works[at] = ends[last], works[last]
        sift_up(state, ends, works, at)
        sift_down(state, ends, works, at, last)
    return work


@subroutine
def place_of(row, size, work):
    """Where work stands in a row of places; NONE if it does not."""
    for at in range(size):
        if row[at] == work:
            return at
    return NONE


@subroutine
def remove_prefilling(state, engine, work):
    row = a.prefilling(state)[engine]
    at = place_of(row, a.engines(state)[engine, E_PREFILLING], work)
    a.engines(state)[engine, E_PREFILLING] -= 1
    for place in range(at, a.engines(state)[engine, E_PREFILLING]):
        row[place] = row[place + 1]


@subroutine
def chunk_of(state, engine, work):
    """Which chunk of the run under way is that work's; NONE if none is."""
    return place_of(a.chunk_work(state)[engine], a.engines(state)[engine, E_CHUNKS], np.int64(work))
