"""The most requests that can meet both objectives, whichever others are turned away.

A good request has its prefill done between its arrival and its TTFT objective, and its decode by when its last
token is due: the mean of all its token gaps is no more than that of their longest tenth, so it ends at most
``gaps * tbt_s`` after its first token, hence ``ttft_s + gaps * tbt_s`` after its arrival. A flow takes as much of
each request's work as fits the slots of time in these windows; a request counts in part, as much as of its work
is done, which can only be more than requests that are done entirely. Work of requests that are not good is not
counted: they may be rejected.

Left out before: requests whose own work takes longer than the TTFT objective, whose decode steps alone are longer
than the TBT objective, and those that no instance has room for.
"""

from __future__ import annotations

from math import floor

import numpy as np

from conductor.costs import Floats
from conductor.placement import Objectives, Role
from simulator.bounds.demand import Demand
from simulator.bounds.time_slots import SlotFlow, Slots, spans
from simulator.bounds.work import Work
from simulator.cluster.specification import ClusterSpec

UNITS = 200  # of flow, to the mean request
_MOST_SLOTS = 1_024
_ROUNDING = 1.0 + 1e-9
_FINE = 0.25  # of the TTFT objective, a slot's width where there are not too many


def feasible(cluster: ClusterSpec, demand: Demand, work: Work, objectives: Objectives) -> Floats:
    """1 for requests that could be good alone in the cluster, else 0."""
    fits = demand.prompt_tokens <= max(
        i.kv_tokens for i in cluster.instances if i.role is not Role.DECODE or demand.decode_prefill_tokens
    )
    decodes = np.zeros(len(demand), bool)
    for instance in cluster.instances:
        if instance.role is Role.PREFILL:
            continue
        known = instance.instance_class
        # The mean gap; contexts are summed over the gaps.
        context = demand.contexts / np.maximum(demand.gaps, 1.0)
        gap_s = known.decode_base_s + known.decode_s_per_sequence + known.decode_s_per_context_token * context
        quick = (demand.gaps == 0.0) | (gap_s <= objectives.tbt_s * _ROUNDING)
        decodes |= quick & (demand.prompt_tokens + demand.output_tokens <= instance.kv_tokens)
    return (fits & decodes & (work.own_s <= objectives.ttft_s * _ROUNDING)).astype(float)


def most_good(work: Work, gaps: Floats, possible: Floats, objectives: Objectives) -> int:
    """``possible`` as `feasible` says; arrays of [request]."""
    chosen = np.flatnonzero(possible > 0.0)
    if not len(chosen):
        return 0
    arrival_s = work.arrival_s[chosen]
    due_s = arrival_s + objectives.ttft_s
    ended_s = due_s + gaps[chosen] * objectives.tbt_s
    slots = _slots(float(arrival_s[0]), float(ended_s.max()), objectives)
    prefill_s, decode_s = work.prefill_s[chosen], work.decode_s[chosen]
    flow = SlotFlow(work, slots, float((prefill_s + decode_s).mean()) / UNITS or 1.0)
    prefills, decodes = flow.units(prefill_s), flow.units(decode_s)
    share = prefills / np.maximum(prefills + decodes, 1)
    if prefills.any():
        window = spans(slots, arrival_s, due_s, 0)
        begin_s = np.maximum(window.start_s, arrival_s[window.job])
        widths_s = np.minimum(window.start_s + window.width_s, due_s[window.job]) - begin_s
        lost = share / np.maximum(prefills, 1)
        flow.add_prefills(prefills, window, np.maximum(widths_s, 0.0), np.zeros(len(begin_s)), lost)
    if decodes.any():
        window = spans(slots, arrival_s + work.own_s[chosen], ended_s, 0)
        lost = (1.0 - share) / np.maximum(decodes, 1)
        flow.add_decodes(decodes, window, np.zeros(len(window.job)), lost)
    return floor(len(chosen) - flow.least_cost() + 1e-6)


def _slots(start_s: float, end_s: float, objectives: Objectives) -> Slots:
    wanted = (end_s - start_s) / (_FINE * objectives.ttft_s)
    count = 1 << max(int(np.ceil(np.log2(max(wanted, 1.0)))), 0)
    count = min(count, _MOST_SLOTS)
    return Slots(start_s, (end_s - start_s) / count, count)
