"""The least mean TTFT of any schedule that serves every request.

Four arguments, of which the strongest counts in each busy period of the cluster (within one, what came before and
comes after can only make it worse):

* **own work**: a request's prefill alone, on the fastest instance;
* **arriving together**: more requests at one instant than instances (`simulator.bounds.arriving_together`);
* **one machine**: all instances as one that is as fast as they are together (`simulator.bounds.one_machine`);
* **time slots**: a flow of work to slots of time, where a request's prefill runs on one instance at a time.

**Decodes.** Requests that have their first token hold room until their last, so the decode work that can be put
off at any time is that of requests which fit the memory together. With at most ``rate`` seconds of decode counted
for a token of room, that is ``rate * room_tokens``. Counting prefill when it is done, and decode when a request
has its first token, the cluster is therefore never further behind than that: one machine that did what was
counted, in that order, would end each piece of it at most ``rate * room_tokens / speed`` later. This assumes of
engines that they begin no new prompt while they keep a preempted request waiting.

**Flow.** ``P`` seconds of a prefill that runs at a rate of at most ``f`` until ``C`` are done on average by
``C - P / 2f`` at the latest; the decode of the request is counted at ``C``, which is ``own`` after its arrival
or later. So for any weights of the two parts, ``C`` is at least the weighted mean of when the work is done or
counted, plus the weight of prefill times ``P / 2f``. The flow minimises the sum of these over all requests, each
unit of work at the price of the beginning of its span of slots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np

from conductor.costs import Floats
from simulator.bounds import arriving_together
from simulator.bounds.one_machine import least_waiting_s
from simulator.bounds.time_slots import SlotFlow, Slots, spans
from simulator.bounds.work import Work

SLOTS = 128
FINE = 12
UNITS = 400  # of flow, to the mean request
_CONTENDED = 0.5  # of the own work: a flow of requests that wait less is hardly worth its time


class Argument(StrEnum):
    OWN_WORK = "own work"
    ARRIVING_TOGETHER = "arriving together"
    ONE_MACHINE = "one machine"
    TIME_SLOTS = "time slots"


@dataclass(frozen=True, slots=True)
class _Part:
    """Work that is looked at, and how fast the instances that do it are together."""

    work: Work
    capacity: float
    late_s: float  # of it, at any time, counted but not done

    def one_machine_s(self) -> float:
        """Sum of TTFTs on one machine, which may be as late as it wants."""
        return least_waiting_s(self.work.arrival_s, self.work.prefill_s + self.work.decode_s, self.capacity)


def least_ttft_sums_s(
    work: Work, on_done: Callable[[int], None] = lambda requests: None
) -> dict[Argument, float]:
    """Sums of TTFTs by the argument that bounds them: together of all requests.

    ``on_done`` hears how many requests each busy period had.
    """
    sums = dict.fromkeys(Argument, 0.0)
    for period in _busy_periods(work):
        best, sum_s = _least_ttft_sum_s(period)
        sums[best] += sum_s
        on_done(len(period))
    return sums


def _least_ttft_sum_s(work: Work) -> tuple[Argument, float]:
    own_s = float(work.own_s.sum())
    found = [
        (own_s, Argument.OWN_WORK),
        (arriving_together.least_ttft_sum_s(work), Argument.ARRIVING_TOGETHER),
    ]
    for part in _parts(work) if len(work) > 1 else ():
        sum_s = part.one_machine_s()
        found.append((sum_s - len(work) * part.late_s / part.capacity, Argument.ONE_MACHINE))
        done_s = float((part.work.prefill_s + part.work.decode_s).sum()) / part.capacity
        if sum_s - done_s > _CONTENDED * own_s:
            found.append((_time_slots_s(part), Argument.TIME_SLOTS))
    sum_s, argument = max(found, key=lambda each: each[0])
    return argument, sum_s


def _parts(work: Work) -> Iterator[_Part]:
    """All work where instances do both, else prefill and decode apart."""
    rate = _best_rate(work)
    decode_s = np.minimum(work.decode_s, rate * work.room)
    late_s = rate * work.room_tokens + work.served_late_s
    nothing = np.zeros_like(decode_s)
    if work.mixed > 0.0:
        capacity = work.prefill_only + work.decode_only + work.mixed
        yield _Part(replace(work, decode_s=decode_s), capacity, late_s)
    if work.prefill_only > 0.0:
        yield _Part(replace(work, decode_s=nothing), work.prefill_capacity, 0.0)
    if work.decode_only > 0.0:
        yield _Part(replace(work, prefill_s=nothing, decode_s=decode_s), work.decode_capacity, late_s)


def _best_rate(work: Work) -> float:
    """Seconds of decode by token of room, that leave most work beyond what may be late.

    ``sum(min(decode_s, rate * room)) - rate * room_tokens`` is greatest where the requests with denser decodes
    fill the room.
    """
    density = work.decode_s / np.maximum(work.room, 1e-9)
    order = np.argsort(-density)
    full = int(np.searchsorted(np.cumsum(work.room[order]), work.room_tokens))
    return float(density[order[full]]) if full < len(order) else 0.0


def _time_slots_s(part: _Part) -> float:
    work = part.work
    slots = _slots(part)
    total_s = work.prefill_s + work.decode_s
    flow = SlotFlow(work, slots, float(total_s.mean()) / UNITS, part.late_s)
    prefills, decodes = flow.units(work.prefill_s), flow.units(work.decode_s)
    share = prefills / np.maximum(prefills + decodes, 1)
    last_s = slots.end_s - work.arrival_s
    sum_s = 0.0
    if prefills.any():
        window = spans(slots, work.arrival_s, np.full(len(work), slots.end_s), FINE)
        arrival_s = work.arrival_s[window.job]
        begin_s = np.maximum(window.start_s, arrival_s)
        widths_s = window.start_s + window.width_s - begin_s
        price = share / np.maximum(prefills, 1)
        flow.add_prefills(
            prefills, window, widths_s, price[window.job] * (begin_s - arrival_s), price * last_s
        )
        sum_s += float((share * prefills).sum() * flow.unit_s / (2.0 * work.fastest))
    if decodes.any():
        done_s = work.arrival_s + work.own_s
        window = spans(slots, done_s, np.full(len(work), slots.end_s), FINE)
        begin_s = np.maximum(window.start_s, done_s[window.job])
        price = (1.0 - share) / np.maximum(decodes, 1)
        flow.add_decodes(
            decodes, window, price[window.job] * (begin_s - work.arrival_s[window.job]), price * last_s
        )
    return sum_s + flow.least_cost()


def _slots(part: _Part) -> Slots:
    """From the first arrival until one machine would be done, and a tenth more."""
    work = part.work
    needs_s = (work.prefill_s + work.decode_s) / part.capacity
    length_s = 1.1 * (_ends_s(work.arrival_s, needs_s)[-1] - work.arrival_s[0]) + float(work.own_s.max())
    return Slots(float(work.arrival_s[0]), float(length_s) / SLOTS, SLOTS)


def _busy_periods(work: Work) -> Iterator[Work]:
    """Cut where one machine with all the work is idle, and nobody's own work alone would go on."""
    capacity = work.prefill_only + work.decode_only + work.mixed
    ends_s = _ends_s(work.arrival_s, (work.prefill_s + work.decode_s) / capacity)
    busy_s = np.maximum.accumulate(np.maximum(ends_s, work.arrival_s + work.own_s))
    cuts = np.flatnonzero(work.arrival_s[1:] >= busy_s[:-1]) + 1
    for first, stop in zip([0, *cuts.tolist()], [*cuts.tolist(), len(work)], strict=True):
        if stop > first:
            yield work.of(slice(first, stop))


def _ends_s(arrival_s: Floats, needs_s: Floats) -> Floats:
    """When one machine ends each job, first come, first served."""
    before_s = np.cumsum(needs_s) - needs_s
    return np.maximum.accumulate(arrival_s - before_s) + before_s + needs_s
