"""The state's arrays as kernels see them.

Kernels get one number, the address of a table with the address and the shape of every array. Handing the arrays
themselves from function to function makes kernels take minutes to compile.
"""

# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numba.np.arrayobj import populate_array
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Words = NDArray[np.uint64]

_ENTRY: Final = 4  # address and up to three dimensions


class Arrays(NamedTuple):
    """The state of a simulated cluster; columns are named in `layout`.

    Those of [engine, place] have a row for each engine.
    """

    counters: Ints  # [C_COLUMNS]
    hashes: Words  # of all requests, one chain behind the other
    work: Ints  # [work, W_COLUMNS]
    work_s: Floats  # [work, F_COLUMNS]
    engines: Ints  # [engine, E_COLUMNS]
    speeds: Floats  # [engine, G_COLUMNS]
    ends: Floats  # tournament over the engines' ends: the least of nodes 2i and 2i+1 stands at i
    touched: Ints  # engines to look at before time goes on
    prefilling: Ints  # [engine, place] work, in order of beginning
    chunk_work: Ints
    chunk_tokens: Ints
    decode_end: Ints  # heap: step after which it ends
    decode_work: Ints
    silent: Ints
    log_s: Floats  # [engine, run, (first_s, growth_s)]
    log_steps: Ints  # [engine, run]
    segments: Ints  # [segment, (first run, run after the last, next)]
    segment_gap_s: Floats  # time of the last token, then the gap up to the next one
    stores: Ints  # [store, S_COLUMNS]
    residencies: Ints  # [residency, R_COLUMNS]
    residency_hash: Words
    table: Ints  # open addressing: residency or NONE
    pools: Ints  # [engine, pool]: whether it is a member, and how it writes there
    pool_source: Ints  # POD or REMOTE
    pool_latency_s: Floats
    load_blocks: Ints  # scratch, [store]: blocks to load from it; zero between uses
    events: Ints  # [event, V_COLUMNS]
    links: Floats  # [link]: bytes per second
    link_flows: Ints  # [link]: that share it
    link_bytes: Floats  # [link]: that it was given to carry, in all
    distances: Floats  # [distance, (bytes per second, latency)]
    copies: Ints  # [copy, P_COLUMNS]
    flows: Ints  # [flow, L_COLUMNS]
    flow_s: Floats  # [flow, M_COLUMNS]
    timers: Ints  # work
    timer_s: Floats
    notices: Floats  # [notice, N_COLUMNS]
    gaps_s: Floats  # scratch


def addresses(arrays: Arrays) -> Ints:
    """The table whose address kernels take. It and the arrays must be kept by the caller."""
    table = np.zeros(_ENTRY * len(arrays), np.int64)
    for number, array in enumerate(arrays):
        table[_ENTRY * number] = array.ctypes.data
        table[_ENTRY * number + 1 : _ENTRY * number + 1 + array.ndim] = array.shape
    return table


def _view(name: str, dimensions: int, kind: types.Type) -> Any:
    """What makes the array of that name out of the address of `addresses`; no function, so nothing to compile."""
    entry = 8 * _ENTRY * Arrays._fields.index(name)
    array_type = types.Array(kind, dimensions, "C")

    def view(_context: Any, _address: Any) -> Any:
        def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            word = ir.IntType(64)

            def load(offset: int) -> Any:
                place = builder.add(arguments[0], ir.Constant(word, entry + offset))
                return builder.load(builder.inttoptr(place, word.as_pointer()))

            shape = [load(8 * (1 + dimension)) for dimension in range(dimensions)]
            strides = [ir.Constant(word, 8)]
            for size in reversed(shape[1:]):
                strides.insert(0, builder.mul(strides[0], size))
            array = context.make_array(array_type)(context, builder)
            data = builder.inttoptr(load(0), context.get_data_type(kind).as_pointer())
            populate_array(array, data, shape, strides, ir.Constant(word, 8), None)
            return array._getvalue()

        return array_type(types.int64), generate

    view.__name__ = name
    return intrinsic(view)


counters = _view("counters", 1, types.int64)
hashes = _view("hashes", 1, types.uint64)
work = _view("work", 2, types.int64)
work_s = _view("work_s", 2, types.float64)
engines = _view("engines", 2, types.int64)
speeds = _view("speeds", 2, types.float64)
ends = _view("ends", 1, types.float64)
touched = _view("touched", 1, types.int64)
prefilling = _view("prefilling", 2, types.int64)
chunk_work = _view("chunk_work", 2, types.int64)
chunk_tokens = _view("chunk_tokens", 2, types.int64)
decode_end = _view("decode_end", 2, types.int64)
decode_work = _view("decode_work", 2, types.int64)
silent = _view("silent", 2, types.int64)
log_s = _view("log_s", 3, types.float64)
log_steps = _view("log_steps", 2, types.int64)
segments = _view("segments", 2, types.int64)
segment_gap_s = _view("segment_gap_s", 1, types.float64)
stores = _view("stores", 2, types.int64)
residencies = _view("residencies", 2, types.int64)
residency_hash = _view("residency_hash", 1, types.uint64)
table = _view("table", 1, types.int64)
pools = _view("pools", 2, types.int64)
pool_source = _view("pool_source", 1, types.int64)
pool_latency_s = _view("pool_latency_s", 1, types.float64)
load_blocks = _view("load_blocks", 1, types.int64)
events = _view("events", 2, types.int64)
links = _view("links", 1, types.float64)
link_flows = _view("link_flows", 1, types.int64)
link_bytes = _view("link_bytes", 1, types.float64)
distances = _view("distances", 2, types.float64)
copies = _view("copies", 2, types.int64)
flows = _view("flows", 2, types.int64)
flow_s = _view("flow_s", 2, types.float64)
timers = _view("timers", 1, types.int64)
timer_s = _view("timer_s", 1, types.float64)
notices = _view("notices", 2, types.float64)
gaps_s = _view("gaps_s", 1, types.float64)
