"""Admission as the configuration asks for it."""

from __future__ import annotations

import structlog

from conductor.admission import (
    Gate,
    OutputLengths,
    WaitingRoom,
    dump_output_lengths,
    load_output_lengths,
    make_rule,
)
from conductor.config import AdmissionConfig
from conductor.dispatcher import Dispatcher
from conductor.scheduler import Scheduler
from conductor.state_store import StateStore

_LENGTHS_KEY = "output_lengths"

_log = structlog.get_logger(__name__)


def make_gate(config: AdmissionConfig, store: StateStore) -> Gate:
    """With the lengths of answers that were learned before."""
    return Gate(make_rule(config.rule, config.parameters), _saved_lengths(store))


def save_lengths(gate: Gate, store: StateStore) -> None:
    """For the next start."""
    store.put(_LENGTHS_KEY, dump_output_lengths(gate.lengths))


def make_dispatcher(config: AdmissionConfig, scheduler: Scheduler) -> Dispatcher:
    """Holds requests where the queue has room for any."""
    queue = config.queue
    room = None
    if queue.capacity:
        room = WaitingRoom(queue.capacity, weights=queue.weights, ageing=queue.ageing)
    return Dispatcher(scheduler, room, hold_above_s=queue.hold_above_s, deadline_s=queue.deadline_s)


def _saved_lengths(store: StateStore) -> OutputLengths:
    saved = store.get(_LENGTHS_KEY)
    try:
        return load_output_lengths(saved) if saved is not None else OutputLengths()
    except ValueError as error:
        _log.warning("the saved lengths of answers are ignored", reason=str(error))
        return OutputLengths()
