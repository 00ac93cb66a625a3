"""Room on a device: who gets it, what of a prompt is there already, and who loses it."""

# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

import numpy as np

from cache_index.kernel_set import subroutine
from simulator.cluster.kernels import arrays as a
from simulator.cluster.kernels.flows import DISK_LINK, HOST_LINK, IN, peer_flow, start_flow
from simulator.cluster.kernels.layout import (
    C_BLOCK_TOKENS,
    C_ORDER,
    DECODE,
    DECODER,
    DECODING,
    DISK,
    E_CONTEXT,
    E_DECODING,
    E_DEVICE,
    E_DISK,
    E_HOST,
    E_KV_TOKENS,
    E_LOOSE,
    E_PREFILLING,
    E_REFERRED,
    E_SILENT,
    E_STEPS,
    E_WAITING,
    F_FIRST_S,
    G_KV_BYTES,
    G_LOAD_BYTES_PER_S,
    G_LOAD_LATENCY_S,
    G_NIC_LATENCY_S,
    G_STORED_BYTES,
    HOST,
    LINKS_PER_ENGINE,
    NONE,
    PEER,
    PREFILL,
    R_REFERENCES,
    S_IDLE,
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
    W_ORDER,
    W_OUTPUT,
    W_PEER,
    W_PLAN,
    W_PREEMPTIONS,
    W_PROMPT,
    W_ROOM,
    W_SAID,
    W_STANDS,
    W_TARGET,
    WAITING,
)
from simulator.cluster.kernels.pace import begin_segment
from simulator.cluster.kernels.queues import place_of, push_front, remove_decode, remove_prefilling
from simulator.cluster.kernels.stores import evict, find, let_go, refer


@subroutine
def used_tokens(state, engine):
    """Taken by requests; what is merely cached does not count."""
    row = a.engines(state)[engine]
    return row[E_REFERRED] * a.counters(state)[C_BLOCK_TOKENS] + row[E_LOOSE]


@subroutine
def make_idle_fit(state, engine, spare_tokens):
    """Evict what is merely cached until ``spare_tokens`` are free; False when there is nothing left to evict."""
    device, block = a.engines(state)[engine, E_DEVICE], a.counters(state)[C_BLOCK_TOKENS]
    free = a.engines(state)[engine, E_KV_TOKENS] - used_tokens(state, engine) - spare_tokens
    while a.stores(state)[device, S_IDLE] * block > free:
        if a.stores(state)[device, S_IDLE] == 0:
            return False
        evict(state, device)
    return free >= 0


@subroutine
def take_room(state, work):
    """Room for what a leg has to have before it decodes; False, and no effect, if there is none.

    Blocks that are on the device already are referred to, and what can be loaded is not yet looked for.
    """
    row = a.work(state)[work]
    engine = a.engines(state)[row[W_ENGINE]]
    block = a.counters(state)[C_BLOCK_TOKENS]
    device = engine[E_DEVICE]
    first_decode = row[W_LEG] == DECODE and row[W_PREEMPTIONS] == 0
    # The last prompt token is always computed, with its block; a token said needs room, too.
    usable = min((row[W_PROMPT] - 1) // block, row[W_BLOCKS])
    room = row[W_TARGET] if first_decode or row[W_LEG] == PREFILL else row[W_TARGET] + 1
    matched, found = 0, 0
    while matched < usable:
        residency = find(state, device, a.hashes(state)[row[W_HASHES] + matched])
        if residency == NONE:
            break
        if a.residencies(state)[residency, R_REFERENCES] == 0:
            found += 1
        matched += 1
    growth = engine[E_DECODING]  # tokens that the next step says
    wanted = used_tokens(state, row[W_ENGINE]) + found * block + room - matched * block + growth
    if wanted > engine[E_KV_TOKENS]:
        return False
    for position in range(matched):
        refer(state, row[W_ENGINE], find(state, device, a.hashes(state)[row[W_HASHES] + position]))
    row[W_COMMITTED] = matched
    row[W_ROOM] = room
    row[W_DONE] = matched * block
    engine[E_LOOSE] += room - matched * block
    make_idle_fit(state, row[W_ENGINE], growth)
    row[W_ORDER] = a.counters(state)[C_ORDER]
    a.counters(state)[C_ORDER] += 1
    if row[W_PREEMPTIONS] == 0:
        row[W_CACHED] = row[W_DONE]
    return True


@subroutine
def store_with(state, work, position):
    """Where a block can be loaded from, the nearest such store; NONE for nowhere. A peer is named by its device."""
    row = a.work(state)[work]
    engine = row[W_ENGINE]
    block_hash = a.hashes(state)[row[W_HASHES] + position]
    for tier in (E_HOST, E_DISK):
        store = a.engines(state)[engine, tier]
        if store != NONE and find(state, store, block_hash) != NONE:
            return store
    first_pool = a.stores(state).shape[0] - a.pools(state).shape[1]
    for pool in range(a.pools(state).shape[1]):
        if a.pools(state)[engine, pool] != 0 and find(state, first_pool + pool, block_hash) != NONE:
            return first_pool + pool
    peer = row[W_PEER]
    if peer != NONE:
        for tier in (E_DEVICE, E_HOST):
            store = a.engines(state)[peer, tier]
            if store != NONE and find(state, store, block_hash) != NONE:
                return a.engines(state)[peer, E_DEVICE]
    return np.int64(NONE)


@subroutine
def start_load(state, work, source, store, now_s):
    """A flow that brings the blocks that were counted for a store, if there are any."""
    if store == NONE or a.load_blocks(state)[store] == 0:
        return
    row = a.work(state)[work]
    engine = row[W_ENGINE]
    tokens = a.load_blocks(state)[store] * a.counters(state)[C_BLOCK_TOKENS]
    a.load_blocks(state)[store] = 0
    row[W_LOADS] += 1
    if row[W_PREEMPTIONS] == 0:
        row[W_FROM + source] += tokens
    if source == PEER:
        left_bytes = tokens * a.speeds(state)[engine, G_KV_BYTES]
        nic_latency_s = a.speeds(state)[engine, G_NIC_LATENCY_S]
        peer_flow(state, work, source, row[W_PEER], engine, nic_latency_s, left_bytes, 0, now_s)
        return
    left_bytes = tokens * a.speeds(state)[engine, G_STORED_BYTES + source]
    cap = a.speeds(state)[engine, G_LOAD_BYTES_PER_S + source]
    latency_s = a.speeds(state)[engine, G_LOAD_LATENCY_S + source]
    if source == HOST or source == DISK:  # noqa: SIM109  (`in` takes long to compile)
        giver = LINKS_PER_ENGINE * engine + (HOST_LINK if source == HOST else DISK_LINK)
        taker = NONE
    else:
        pool = store - (a.stores(state).shape[0] - a.pools(state).shape[1])
        giver = LINKS_PER_ENGINE * a.engines(state).shape[0] + pool
        taker = LINKS_PER_ENGINE * engine + IN
        latency_s += a.pool_latency_s(state)[pool]
    coder = LINKS_PER_ENGINE * engine + DECODER + source
    if a.links(state)[coder] == np.inf:
        coder = NONE
    start_flow(state, work, source, giver, taker, coder, cap, latency_s, left_bytes, 0, now_s)


@subroutine
def start_loads(state, work, now_s):
    """Begin to load what the placement planned and is still there; whether there is anything to wait for.

    One flow for each store, side by side.
    """
    row = a.work(state)[work]
    block = a.counters(state)[C_BLOCK_TOKENS]
    position = row[W_COMMITTED]
    stop = min(row[W_PLAN], min((row[W_PROMPT] - 1) // block, row[W_BLOCKS]))
    while position < stop:
        store = store_with(state, work, position)
        if store == NONE:
            break
        a.load_blocks(state)[store] += 1
        position += 1
    if position == row[W_COMMITTED]:
        return False
    engine = row[W_ENGINE]
    start_load(state, work, HOST, a.engines(state)[engine, E_HOST], now_s)
    start_load(state, work, DISK, a.engines(state)[engine, E_DISK], now_s)
    first_pool = a.stores(state).shape[0] - a.pools(state).shape[1]
    for pool in range(a.pools(state).shape[1]):
        start_load(state, work, a.pool_source(state)[pool], first_pool + pool, now_s)
    if row[W_PEER] != NONE:
        start_load(state, work, PEER, a.engines(state)[row[W_PEER], E_DEVICE], now_s)
    row[W_DONE] = position * block
    if row[W_PREEMPTIONS] == 0:
        row[W_CACHED] = row[W_DONE]
    return True


@subroutine
def release(state, work):
    """Give up what a leg took: its committed blocks stay cached, the rest is free."""
    row = a.work(state)[work]
    engine = row[W_ENGINE]
    block = a.counters(state)[C_BLOCK_TOKENS]
    a.engines(state)[engine, E_LOOSE] -= row[W_ROOM] - row[W_COMMITTED] * block
    let_go(state, engine, row[W_HASHES], row[W_COMMITTED])
    row[W_ROOM] = row[W_COMMITTED] = 0


@subroutine
def pause_decode(state, engine, at):
    """Take a decode out of the heap, its books brought up to date; whether it was silent."""
    work = remove_decode(state, engine, at)
    row = a.work(state)[work]
    row[W_SAID] = row[W_OUTPUT] - (row[W_END_STEP] - a.engines(state)[engine, E_STEPS])
    row[W_ROOM] = row[W_PROMPT] + row[W_SAID]
    a.engines(state)[engine, E_CONTEXT] -= row[W_PROMPT] + row[W_SAID]
    silent = place_of(a.silent(state)[engine], a.engines(state)[engine, E_SILENT], work)
    if silent == NONE:
        return False
    a.engines(state)[engine, E_SILENT] -= 1
    for place in range(silent, a.engines(state)[engine, E_SILENT]):
        a.silent(state)[engine, place] = a.silent(state)[engine, place + 1]
    return True


@subroutine
def preempt_youngest(state, engine, now_s):
    """Send the request that was admitted last back to the front of the queue, to be computed again.

    A leg that only prefills is left alone. False when there is nobody to send.
    """
    victim, place, order = NONE, NONE, np.int64(-1)
    for at in range(a.engines(state)[engine, E_DECODING]):
        work = a.decode_work(state)[engine, at]
        if a.work(state)[work, W_ORDER] > order:
            victim, place, order = work, at, a.work(state)[work, W_ORDER]
    for at in range(a.engines(state)[engine, E_PREFILLING]):
        work = a.prefilling(state)[engine, at]
        loading = a.work(state)[work, W_LOADS] > 0
        if a.work(state)[work, W_LEG] != PREFILL and not loading and a.work(state)[work, W_ORDER] > order:
            victim, place, order = work, NONE, a.work(state)[work, W_ORDER]
    if victim == NONE:
        return False
    row = a.work(state)[victim]
    if row[W_STANDS] == DECODING:
        silent = pause_decode(state, engine, place)
        if a.work_s(state)[victim, F_FIRST_S] < np.inf and not silent:
            begin_segment(state, engine, victim, now_s)
    else:
        remove_prefilling(state, engine, victim)
    release(state, victim)
    row[W_DONE] = 0
    row[W_TARGET] = row[W_PROMPT] + row[W_SAID]
    row[W_PREEMPTIONS] += 1
    row[W_STANDS] = WAITING
    push_front(state, engine, E_WAITING, victim)
    return True
