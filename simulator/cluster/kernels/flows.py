"""Bytes on their way: loads from slower tiers and pools, fetches from peers, hand-offs.

A flow uses up to three links: those of both ends, and the coder of the engine that encodes or decodes what
travels. Each link is shared equally by the flows that have bytes to move over it, and a flow moves at the least of
its shares and its own cap (what it leaves of a share, others do not get), after a latency. Bytes are those that
travel.
"""

# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

import numpy as np

from cache_index.kernel_set import subroutine
from simulator.cluster.kernels import arrays as a
from simulator.cluster.kernels.layout import (
    C_FLOWS,
    DECODER,
    E_LOCATION,
    L_CODER,
    L_COLUMNS,
    L_GIVER,
    L_MORE,
    L_SOURCE,
    L_TAKER,
    L_WORK,
    LINKS_PER_ENGINE,
    M_BYTES_PER_S,
    M_CAP_BYTES_PER_S,
    M_COLUMNS,
    M_LEFT_BYTES,
    M_SINCE_S,
    NONE,
)

OUT, IN, HOST_LINK, DISK_LINK = range(DECODER)
_AT_ONCE_S = 1e-9  # flows that would be through within this time of each other are through together
_LEAST_BYTES = 1e-3  # left of a flow that is through until it is taken out, for it is not idle


@subroutine
def settle(state, flow, now_s):
    """Bring what is left up to date."""
    since_s = a.flow_s(state)[flow, M_SINCE_S]
    if now_s > since_s:  # else its latency is not over
        speed = a.flow_s(state)[flow, M_BYTES_PER_S]
        left = a.flow_s(state)[flow, M_LEFT_BYTES] - (now_s - since_s) * speed
        through = left <= speed * _AT_ONCE_S
        a.flow_s(state)[flow, M_LEFT_BYTES] = _LEAST_BYTES if through else left
        a.flow_s(state)[flow, M_SINCE_S] = now_s


@subroutine
def share(state, giver, taker, coder, now_s):
    """The flows over these links move at other speeds from now on."""
    for flow in range(a.counters(state)[C_FLOWS]):
        of_giver = giver != NONE and a.flows(state)[flow, L_GIVER] == giver
        of_taker = taker != NONE and a.flows(state)[flow, L_TAKER] == taker
        of_coder = coder != NONE and a.flows(state)[flow, L_CODER] == coder
        if not (of_giver or of_taker or of_coder) or a.flow_s(state)[flow, M_LEFT_BYTES] <= 0.0:
            continue
        settle(state, flow, now_s)
        speed = a.flow_s(state)[flow, M_CAP_BYTES_PER_S]
        link = a.flows(state)[flow, L_GIVER]
        if link != NONE:
            speed = min(speed, a.links(state)[link] / max(a.link_flows(state)[link], 1))
        link = a.flows(state)[flow, L_TAKER]
        if link != NONE:
            speed = min(speed, a.links(state)[link] / max(a.link_flows(state)[link], 1))
        link = a.flows(state)[flow, L_CODER]
        if link != NONE:
            speed = min(speed, a.links(state)[link] / max(a.link_flows(state)[link], 1))
        a.flow_s(state)[flow, M_BYTES_PER_S] = speed


@subroutine
def share_of(state, flow, now_s):
    """The same for the links of a flow."""
    row = a.flows(state)[flow]
    share(state, row[L_GIVER], row[L_TAKER], row[L_CODER], now_s)


@subroutine
def use_links(state, flow, more):
    """Count a flow among those of its links, or no more."""
    for column in (L_GIVER, L_TAKER, L_CODER):
        link = a.flows(state)[flow, column]
        if link != NONE:
            a.link_flows(state)[link] += more


@subroutine
def carry(state, flow, more_bytes):
    """Count bytes among those that a flow's links were given to carry."""
    for column in (L_GIVER, L_TAKER, L_CODER):
        link = a.flows(state)[flow, column]
        if link != NONE:
            a.link_bytes(state)[link] += more_bytes


@subroutine
def start_flow(state, work, source, giver, taker, coder, cap, latency_s, left_bytes, more, now_s):
    """A flow that ``work`` waits for; NONE as a link is one without limit."""
    flow = a.counters(state)[C_FLOWS]
    a.counters(state)[C_FLOWS] += 1
    a.flows(state)[flow, L_WORK] = work
    a.flows(state)[flow, L_GIVER] = giver
    a.flows(state)[flow, L_TAKER] = taker
    a.flows(state)[flow, L_MORE] = more
    a.flows(state)[flow, L_SOURCE] = source
    a.flows(state)[flow, L_CODER] = coder
    a.flow_s(state)[flow, M_LEFT_BYTES] = left_bytes
    a.flow_s(state)[flow, M_SINCE_S] = now_s + latency_s
    a.flow_s(state)[flow, M_CAP_BYTES_PER_S] = cap
    a.flow_s(state)[flow, M_BYTES_PER_S] = cap
    if left_bytes > 0.0:
        carry(state, flow, left_bytes)
        use_links(state, flow, 1)
        share(state, giver, taker, coder, now_s)


@subroutine
def add_bytes(state, flow, added_bytes, now_s):
    """More is there to move."""
    if added_bytes <= 0.0:
        return
    idle = a.flow_s(state)[flow, M_LEFT_BYTES] <= 0.0
    if idle:
        a.flow_s(state)[flow, M_SINCE_S] = max(a.flow_s(state)[flow, M_SINCE_S], now_s)
        use_links(state, flow, 1)
    else:
        settle(state, flow, now_s)
    a.flow_s(state)[flow, M_LEFT_BYTES] += added_bytes
    carry(state, flow, added_bytes)
    if idle:
        share_of(state, flow, now_s)


@subroutine
def flow_end_s(state, flow):
    """When a flow is through at its present speed."""
    if a.flow_s(state)[flow, M_LEFT_BYTES] <= 0.0:
        return np.inf if a.flows(state)[flow, L_MORE] == 1 else a.flow_s(state)[flow, M_SINCE_S]
    if a.flow_s(state)[flow, M_LEFT_BYTES] <= _LEAST_BYTES:
        return a.flow_s(state)[flow, M_SINCE_S]
    return (
        a.flow_s(state)[flow, M_SINCE_S]
        + a.flow_s(state)[flow, M_LEFT_BYTES] / a.flow_s(state)[flow, M_BYTES_PER_S]
    )


@subroutine
def next_flow(state):
    """The flow that is through first, and when; NONE and infinity without any."""
    first, end_s = NONE, np.inf
    for flow in range(a.counters(state)[C_FLOWS]):
        other_s = flow_end_s(state, flow)
        if other_s < end_s:
            first, end_s = flow, other_s
    return first, end_s


@subroutine
def rest_flow(state, flow, now_s):
    """A flow to which more will be added has moved all that it had."""
    a.flow_s(state)[flow, M_LEFT_BYTES] = 0.0
    a.flow_s(state)[flow, M_SINCE_S] = now_s
    use_links(state, flow, -1)
    share_of(state, flow, now_s)


@subroutine
def end_flow(state, flow, now_s):
    """Take a flow out, through or given up."""
    giver, taker = a.flows(state)[flow, L_GIVER], a.flows(state)[flow, L_TAKER]
    coder = a.flows(state)[flow, L_CODER]
    busy = a.flow_s(state)[flow, M_LEFT_BYTES] > 0.0
    if busy:
        settle(state, flow, now_s)
        if a.flow_s(state)[flow, M_LEFT_BYTES] > _LEAST_BYTES:
            carry(state, flow, -a.flow_s(state)[flow, M_LEFT_BYTES])
        use_links(state, flow, -1)
    a.counters(state)[C_FLOWS] -= 1
    for other in range(flow, a.counters(state)[C_FLOWS]):
        for column in range(L_COLUMNS):  # to assign rows takes seconds to compile
            a.flows(state)[other, column] = a.flows(state)[other + 1, column]
        for column in range(M_COLUMNS):
            a.flow_s(state)[other, column] = a.flow_s(state)[other + 1, column]
    if busy:
        share(state, giver, taker, coder, now_s)


@subroutine
def distance_of(state, one, other):
    """Index of the links between two engines: the nearest thing that they share."""
    for level in range(4):
        if a.engines(state)[one, E_LOCATION + level] == a.engines(state)[other, E_LOCATION + level]:
            return level
    return 4


@subroutine
def peer_flow(state, work, source, giver, taker, nic_latency_s, left_bytes, more, now_s):
    """A flow from one engine's network card to another's."""
    distance = distance_of(state, giver, taker)
    cap, latency_s = a.distances(state)[distance, 0], a.distances(state)[distance, 1]
    start_flow(
        state,
        work,
        source,
        LINKS_PER_ENGINE * giver + OUT,
        LINKS_PER_ENGINE * taker + IN,
        NONE,
        cap,
        latency_s + nic_latency_s,
        left_bytes,
        more,
        now_s,
    )
