"""Compiled estimates: what a request would cost on every rank of a roster, in one pass over the tables.

Column numbers are those of `conductor.costs.tables`; all times are seconds. Terms of rank ``i``:

* queue: what remains of the head of its prefill queue, and the predicted prefills behind it;
* plan: from the device prefix on, load from the slower tiers, fetch from the best peer, compute the rest. The
  cut point is optimised: without overlap of transfer and compute the cost is concave between the ends of the
  tiers' prefixes, so one of these ends is best; with layer-wise overlap the point where both take equally long
  is a candidate too;
* interference: each step of the prefill also carries the rank's decodes;
* decode: a step with the request aboard, at the middle of its answer; what does not fit waits for others to end.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from cache_index.kernel_cache import cache_directory, cached_njit
from conductor.costs import tables as t
from conductor.costs import topology
from conductor.costs.instance_class import Floats, Ints

_DIRECTORY = cache_directory(Path(__file__), Path(t.__file__), Path(topology.__file__))

Tokens = NDArray[np.int32]

TIERS: Final = t.TIER_LATENCY_S - t.TIER_S_PER_BYTE
_POOLED: Final = int(topology.POOL_TIERS[0])  # the first tier that may be a pool's
SOURCES: Final = 4  # peers that a plan may fetch from, the longest prefixes of different racks

# What a second of prefill costs others: whoever comes next anywhere, and those who will queue behind it, for whom
# the queue now stands in.
WORK_WEIGHT: Final = 0.1
QUEUE_DELAY_WEIGHT: Final = 1.0
# And by what it evicts, on a rank that fills its whole device tier in STORED_MEMORY_S: as much is computed again
# later, and later turns of a conversation that has moved follow it. Where less than SPARE of that memory is free
# of requests under way, what is stored makes them wait as well, and the price is that of the room left.
EVICTION_WEIGHT: Final = 10.0
SPARE: Final = 0.3
LEAST_SPARE: Final = 0.03

# Steps are filled up by prompts that nobody has sent yet: one that is to last for half a TBT objective may already
# exceed it, one of the whole objective is taken to.
LONG: Final = 0.5

# ---- rows of the estimates in seconds ----
QUEUE_S: Final = 0
PREFILL_S: Final = 1
FETCH_S: Final = 2
TBT_S: Final = 3
WAIT_S: Final = 4  # until the KV of the request fits, were it decoded here
INFLICTED_S: Final = 5
KV_S_PER_TOKEN: Final = 6  # receiving it, over a link as wide as any
HARM: Final = 7  # requests aboard that the prefill would make miss their TBT objective; no seconds
STEP_S: Final = 8  # the longest that carries the prefill
EVICTION_S: Final = 9
SECONDS_ROWS: Final = 10

# ---- rows of the plans ----
PLAN_TOKENS: Final = 0
PLAN_LOCAL: Final = 1  # of these, from the rank's own tiers
PLAN_PEER: Final = 2
PLACED: Final = 3  # not of the plan, but read with it: ever placed, to spread ties
PLAN_ROWS: Final = 4


def _kernel(function: Callable[..., Any]) -> Any:
    return cached_njit(function, _DIRECTORY, nogil=False)


@_kernel
def queue_s(loads: Floats, row: int, now_s: float) -> float:
    """Seconds until a prefill placed now would begin."""
    if loads[row, t.PENDING_PREFILLS] == 0.0:
        return 0.0
    rest = loads[row, t.REST_PREDICTED_S]
    head = loads[row, t.HEAD_SINCE_S] + loads[row, t.HEAD_PREDICTED_S] - now_s
    if head < 0.0:
        if loads[row, t.HEAD_OBSERVED] == 0.0:
            rest = max(rest + head, 0.0)  # it ended as predicted, and those behind it went on
        head = 0.0
    return float(head + max(rest, 0.0))


@_kernel
def _evicted(loads: Floats, row: int, capacity: float, now_s: float) -> float:
    """Seconds of others' that a second of prefill costs by what it evicts."""
    stored = loads[row, t.STORED_TOKENS]
    if stored <= 0.0 or capacity <= 0.0:
        return 0.0
    stored *= math.exp((loads[row, t.STORED_AT_S] - now_s) * (1.0 / t.STORED_MEMORY_S))
    weight = EVICTION_WEIGHT if stored >= capacity else EVICTION_WEIGHT * stored / capacity
    used = loads[row, t.REPORTED_USAGE] * capacity
    if used < 0.0:
        used = loads[row, t.CONTEXT_TOKENS]
    if used > (1.0 - SPARE) * capacity:
        weight *= (SPARE + LEAST_SPARE) * capacity / (max(capacity - used, 0.0) + LEAST_SPARE * capacity)
    return float(weight)


@_kernel
def _distance(ranks: Ints, a: int, b: int) -> int:
    """The nearest level at which two rows of the rank table share their location."""
    for level in range(topology.LOCATION_LEVELS):
        if ranks[a, t.LOCATION + level] == ranks[b, t.LOCATION + level]:
            return level
    return topology.LOCATION_LEVELS


@_kernel
def _link_s_per_token(
    links: Floats, distance: int, classes: Floats, giver: int, taker: int, giving: float, taking: float
) -> float:
    """Seconds to move the KV of one token, sharing both ends with ``giving`` and ``taking`` other transfers."""
    widest = links[distance, 0]
    sender = classes[giver, t.NIC_S_PER_BYTE] * (1.0 + giving)
    receiver = classes[taker, t.NIC_S_PER_BYTE] * (1.0 + taking)
    return float(classes[taker, t.KV_BYTES] * max(widest, sender, receiver))


@_kernel
def _compute_s(classes: Floats, c: int, n: float, p: float, decode_s: float) -> float:
    """Prefill of ``n`` tokens behind ``p`` cached ones, each of its steps carrying ``decode_s`` of decodes."""
    todo = n - p
    own = classes[c, t.PREFILL_A] * todo + classes[c, t.PREFILL_B] * (n * n - p * p)
    own += classes[c, t.PREFILL_C] + classes[c, t.PREFILL_D] * p
    seconds = classes[c, t.PREFILL_SCALE] * own
    if decode_s > 0.0:
        seconds += math.ceil(todo / classes[c, t.CHUNK_TOKENS]) * decode_s
    return float(seconds)


@_kernel
def _together_s(fetch_s: float, compute_s: float, layers: float, streams: bool) -> float:
    """A transfer and the compute behind it: one after the other, or layer by layer side by side."""
    if not streams or fetch_s == 0.0:
        return fetch_s + compute_s
    return max(fetch_s, compute_s) + min(fetch_s, compute_s) / layers


@_kernel
def _balanced_cut(
    classes: Floats,
    c: int,
    n: float,
    low: float,
    high: float,
    fetch_low_s: float,
    s_per_token: float,
    decode_s: float,
) -> float:
    """Where between ``low`` and ``high`` fetching takes as long as computing the rest, for layer-wise overlap.

    The fetch grows with the cut and the compute shrinks, so bisection finds it; the ends where they never meet.
    """
    for _ in range(24):
        middle = 0.5 * (low + high)
        if fetch_low_s + s_per_token * middle < _compute_s(classes, c, n, middle, decode_s):
            low = middle
        else:
            high = middle
    return float(0.5 * (low + high))


@_kernel
def find_sources(held: Tokens, rows: Ints, ranks: Ints, loads: Floats, tokens: Ints, sources: Ints) -> int:
    """The peers worth fetching from: the longest prefixes on device or host, one a rack.

    ``held`` [rank, tier] are usable tokens. Writes positions into ``sources`` and returns their number;
    of equal prefixes the one with fewest transfers out.
    """
    found = 0
    for i in range(rows.shape[0]):
        offered = int(held[i, 1])
        if offered <= 0:
            continue
        rack = ranks[rows[i], t.LOCATION + 1]
        at = found
        for s in range(found):
            if ranks[rows[sources[s]], t.LOCATION + 1] == rack:
                at = s
        if at < found:
            other = sources[at]
            busier = loads[rows[i], t.TRANSFERS_OUT] >= loads[rows[other], t.TRANSFERS_OUT]
            if offered < tokens[at] or (offered == tokens[at] and busier):
                continue
        elif found < SOURCES:
            found += 1
        else:
            at = 0
            for s in range(1, SOURCES):
                if tokens[s] < tokens[at]:
                    at = s
            if tokens[at] >= offered:
                continue
        sources[at], tokens[at] = i, offered
    return found


@_kernel
def _harm(loads: Floats, row: int, prefill_s: float) -> float:
    """Requests aboard that would miss their TBT objective because of a prefill, between those told in the table."""
    before_s, before = 0.0, 0.0
    for k in range(len(t.HARM_AT_S)):
        at_s, harm = t.HARM_AT_S[k], loads[row, t.HARM + k]
        if prefill_s < at_s:
            return float(before + (harm - before) * (prefill_s - before_s) / (at_s - before_s))
        before_s, before = at_s, harm
    return float(before)


@_kernel
def estimate(
    rows: Ints,
    loads: Floats,
    ranks: Ints,
    classes: Floats,
    links: Floats,
    pools: Floats,
    held: Tokens,
    now_s: float,
    prompt_tokens: int,
    output_tokens: int,
    tbt_objective_s: float,
    any_fetches: bool,
    seconds: Floats,
    plans: Ints,
) -> None:
    """Fill ``seconds`` [SECONDS_ROWS, rank] and ``plans`` [PLAN_ROWS, rank].

    ``held`` [rank, tier] are usable cached tokens in the tiers up to it; ``any_fetches``: some rank can fetch
    from a peer.
    """
    n, half_answer = float(prompt_tokens), 0.5 * output_tokens
    sources = np.zeros(SOURCES, np.int64)
    source_tokens = np.zeros(SOURCES, np.int64)
    found = find_sources(held, rows, ranks, loads, source_tokens, sources) if any_fetches else 0
    begin_tokens, begin_fetch_s = np.zeros(TIERS), np.zeros(TIERS)  # where a fetch from a peer may begin
    queues, prefills, fetches = seconds[QUEUE_S], seconds[PREFILL_S], seconds[FETCH_S]
    steps, waits, inflicted = seconds[TBT_S], seconds[WAIT_S], seconds[INFLICTED_S]
    kv_s_per_token, harms, longest = seconds[KV_S_PER_TOKEN], seconds[HARM], seconds[STEP_S]
    evictions = seconds[EVICTION_S]
    plan_tokens, plan_local, plan_peer = plans[PLAN_TOKENS], plans[PLAN_LOCAL], plans[PLAN_PEER]
    placed = plans[PLACED]
    per_s = 1.0 / ((1.0 - LONG) * tbt_objective_s)
    # The terms of one class, read again only when the class changes: the stores below might alias the tables.
    known = -1
    a = b = base = d = chunk = scale = layers = 0.0
    decode_base = per_sequence = per_context = kv_bytes = nic = 0.0
    for i in range(rows.shape[0]):
        row = rows[i]
        c = ranks[row, t.CLASS]
        if c != known:
            known = c
            a, b = classes[c, t.PREFILL_A], classes[c, t.PREFILL_B]
            base, d = classes[c, t.PREFILL_C], classes[c, t.PREFILL_D]
            chunk, scale, layers = (
                classes[c, t.CHUNK_TOKENS],
                classes[c, t.PREFILL_SCALE],
                classes[c, t.LAYERS],
            )
            decode_base = classes[c, t.DECODE_SCALE] * classes[c, t.DECODE_BASE_S]
            per_sequence = classes[c, t.DECODE_SCALE] * classes[c, t.DECODE_S_PER_SEQUENCE]
            per_context = classes[c, t.DECODE_SCALE] * classes[c, t.DECODE_S_PER_CONTEXT]
            kv_bytes, nic = classes[c, t.KV_BYTES], classes[c, t.NIC_S_PER_BYTE]
        decodes, context = loads[row, t.ACTIVE_DECODES], loads[row, t.CONTEXT_TOKENS]
        taking = loads[row, t.TRANSFERS_IN]
        streams = ranks[row, t.STREAMS_LAYERS] != 0
        queue_before_s = queue_s(loads, row, now_s)

        # What the decodes aboard add to each step of a prefill, and what a step is with the request aboard.
        aboard_s = per_sequence * decodes + per_context * context
        tbt_s = aboard_s + decode_base + per_sequence + per_context * (n + half_answer)

        device = float(held[i, 0])
        best_s = scale * (a * (n - device) + b * (n * n - device * device) + base + d * device)
        if aboard_s > 0.0:
            best_s += math.ceil((n - device) / chunk) * aboard_s
        best_tokens, best_local, best_peer, best_fetch_s = device, device, -1, 0.0
        # Loads from several tiers are started together, so only the longest latency counts.
        fetch_s, reached, latency_s = 0.0, device, 0.0
        begin_tokens[0], begin_fetch_s[0], begins = device, 0.0, 1
        for tier in range(1, TIERS if held[i, TIERS - 1] > held[i, 0] else 1):
            level = float(held[i, tier])
            if level <= reached:
                continue
            s_per_token = classes[c, t.TIER_S_PER_BYTE + tier] * classes[c, t.KV_BYTES] * (1.0 + taking)
            longer_s = max(classes[c, t.TIER_LATENCY_S + tier] - latency_s, 0.0)
            if tier >= _POOLED and ranks[row, t.POOL + tier - _POOLED] > 0:
                pool = ranks[row, t.POOL + tier - _POOLED] - 1
                over_s = pools[pool, t.POOL_S_PER_BYTE] * kv_bytes / classes[c, t.TIER_RATIO + tier]
                s_per_token = max(s_per_token, over_s)
                # What others will load is on the link first, but for what has arrived when this one's turn comes.
                fetch_s = max(fetch_s, pools[pool, t.POOL_BUSY_UNTIL_S] - now_s - queue_before_s)
            started_s = fetch_s + longer_s
            whole_s = started_s + s_per_token * (level - reached)
            if not whole_s < np.inf:
                break
            total_s = _together_s(whole_s, _compute_s(classes, c, n, level, aboard_s), layers, streams)
            if total_s < best_s:
                best_s, best_tokens, best_local, best_fetch_s = total_s, level, level, whole_s
            if streams:
                cut = _balanced_cut(
                    classes, c, n, reached, level, started_s - s_per_token * reached, s_per_token, aboard_s
                )
                cut_s = started_s + s_per_token * (cut - reached)
                total_s = _together_s(cut_s, _compute_s(classes, c, n, cut, aboard_s), layers, streams)
                if total_s < best_s:
                    best_s, best_tokens, best_local, best_fetch_s = total_s, cut, cut, cut_s
            fetch_s, reached, latency_s = whole_s, level, latency_s + longer_s
            begin_tokens[begins], begin_fetch_s[begins] = level, whole_s
            begins += 1
        if found > 0 and ranks[row, t.FETCHES] != 0:
            for s in range(found):
                j, offered = sources[s], float(source_tokens[s])
                if j == i:
                    continue
                distance = _distance(ranks, row, rows[j])
                giver = ranks[rows[j], t.CLASS]
                s_per_token = _link_s_per_token(
                    links, distance, classes, giver, c, loads[rows[j], t.TRANSFERS_OUT], taking
                )
                for begin in range(begins):
                    low, before_s = begin_tokens[begin], begin_fetch_s[begin]
                    if offered <= low:
                        break
                    started_s = before_s + links[distance, 1] + classes[c, t.NIC_LATENCY_S]
                    whole_s = started_s + s_per_token * (offered - low)
                    total_s = _together_s(
                        whole_s, _compute_s(classes, c, n, offered, aboard_s), layers, streams
                    )
                    if total_s < best_s:
                        best_s, best_tokens, best_fetch_s = total_s, offered, whole_s
                        best_local, best_peer = low, j
                    if streams:
                        cut = _balanced_cut(
                            classes, c, n, low, offered, started_s - s_per_token * low, s_per_token, aboard_s
                        )
                        cut_s = started_s + s_per_token * (cut - low)
                        total_s = _together_s(
                            cut_s, _compute_s(classes, c, n, cut, aboard_s), layers, streams
                        )
                        if total_s < best_s:
                            best_s, best_tokens, best_fetch_s = total_s, cut, cut_s
                            best_local, best_peer = low, j

        capacity = float(ranks[row, t.CAPACITY_TOKENS])
        # The books count a prefix for each request that shares it; the engine once.
        used = context
        if loads[row, t.REPORTED_USAGE] >= 0.0:
            used = min(used, loads[row, t.REPORTED_USAGE] * capacity + loads[row, t.PENDING_TOKENS])
        excess = used + n - device + output_tokens - capacity
        wait_s = 0.0
        if excess > 0.0 and context > 0.0:
            # Decodes aboard end, evenly, within a life of theirs, which is taken to be this request's own.
            wait_s = min(excess / context, 1.0) * output_tokens * tbt_s
        own_s = best_s - (best_fetch_s if not streams else 0.0)
        queues[i] = queue_before_s
        prefills[i] = best_s
        fetches[i] = best_fetch_s
        steps[i] = tbt_s
        waits[i] = wait_s
        inflicted[i] = own_s * (WORK_WEIGHT + QUEUE_DELAY_WEIGHT * loads[row, t.PENDING_PREFILLS])
        evictions[i] = own_s * _evicted(loads, row, capacity, now_s)
        # The longest step is its last one, filled up by the prompts before it as far as the budget goes.
        todo = n - best_tokens
        last = min(todo, chunk)
        others = loads[row, t.PENDING_TOKENS]
        prompts_s = a * last + b * last * (2.0 * n - last) + base
        if others > 0.0:
            others_s = a * others + base * loads[row, t.PENDING_PREFILLS]
            prompts_s += others_s if others <= chunk - last else others_s * (chunk - last) / others
        prompts_s *= scale
        step_s = max(decode_base, prompts_s) + aboard_s
        longest[i] = step_s
        # A step that is no longer than the objective itself is no long gap.
        harms[i] = 0.0
        if decodes > 0.0 and step_s > LONG * tbt_objective_s:
            likely = min((step_s - LONG * tbt_objective_s) * per_s, 1.0)
            harms[i] = likely * _harm(loads, row, own_s)
        plan_tokens[i] = int(best_tokens)
        plan_local[i] = int(best_local)
        plan_peer[i] = best_peer
        kv_s_per_token[i] = kv_bytes * max(links[0, 0], nic * (1.0 + taking))
        placed[i] = int(loads[row, t.PLACEMENTS])
