"""Admission as the configuration asks for it."""

from __future__ import annotations

from conductor.admission import Gate, OutputLengths, WaitingRoom, make_rule
from conductor.config import AdmissionConfig
from conductor.dispatcher import Dispatcher
from conductor.scheduler import Scheduler


def make_gate(config: AdmissionConfig, lengths: OutputLengths) -> Gate:
    """With the lengths of answers that were learned before."""
    return Gate(make_rule(config.rule, config.parameters), lengths)


def make_dispatcher(config: AdmissionConfig, scheduler: Scheduler) -> Dispatcher:
    """Holds requests where the queue has room for any."""
    queue = config.queue
    room = None
    if queue.capacity:
        room = WaitingRoom(queue.capacity, weights=queue.weights, ageing=queue.ageing)
    return Dispatcher(scheduler, room, hold_above_s=queue.hold_above_s, deadline_s=queue.deadline_s)
