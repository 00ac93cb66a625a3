"""What the driver reads: changes of stores, and gauges."""

# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

import numpy as np
from numba import types

from simulator.cluster.kernels import arrays as a
from simulator.cluster.kernels.admission import used_tokens
from simulator.cluster.kernels.batches import run_end_s, running, steps_until
from simulator.cluster.kernels.compilation import KERNELS
from simulator.cluster.kernels.layout import (
    C_EVENTS,
    C_FREE_EVENT,
    E_DECODING,
    E_RUN_STEPS,
    E_WAITING,
    E_WANTS_KV,
    NONE,
    S_EVENTS,
    V_FIRST,
    V_NEXT,
    V_START,
    V_STOP,
    V_STORED,
)

_INT, _SECONDS = types.int64, types.float64


@KERNELS.kernel(_INT, types.int64[:, ::1], types.uint64[::1], nogil=False)
def drain(state, changes, removed):
    """Write what stores have to tell, in order for each of them; returns the number of rows.

    ``changes`` and ``removed`` are those of a `Changes`, its owners the stores, its chains the hashes.
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


@KERNELS.kernel(_INT, _SECONDS, types.float64[:, ::1], nogil=False)
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
