"""From prefill to decode: when a decode leg asks for its KV cache, and what of it can be sent by then."""

# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from cache_index.kernel_set import subroutine
from simulator.cluster.kernels import arrays as a
from simulator.cluster.kernels.flows import add_bytes
from simulator.cluster.kernels.layout import (
    C_FLOWS,
    E_WANTS_KV,
    F_READY,
    G_KV_BYTES,
    HAND_OFF,
    L_SOURCE,
    L_WORK,
    NONE,
    RECEIVING,
    W_CACHED,
    W_ENGINE,
    W_PARTNER,
    W_STANDS,
    W_STREAMS,
    WANTS_KV,
)
from simulator.cluster.kernels.queues import push_back, touch


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
def want_kv(state, decode):
    """A decode leg begins to wait for room and its KV cache."""
    engine = a.work(state)[decode, W_ENGINE]
    a.work(state)[decode, W_STANDS] = WANTS_KV
    push_back(state, engine, E_WANTS_KV, decode)
    touch(state, engine)
