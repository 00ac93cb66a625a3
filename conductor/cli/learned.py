"""What a scheduler has learned, kept over restarts: corrections of its cost model and the lengths of answers."""

from __future__ import annotations

import asyncio

import structlog

from conductor.admission import (
    OutputLengths,
    dump_output_lengths,
    load_output_lengths,
    pieces_of_output_lengths,
)
from conductor.costs import Calibration, dump_calibrations, load_calibrations
from conductor.scheduler import Scheduler
from conductor.state_store import StateStore

_CALIBRATIONS = "calibrations"
_LENGTHS = "output_lengths"
_SAVE_EVERY_S = 60.0
_BETWEEN_PIECES_S = 0.005

_log = structlog.get_logger(__name__)


def save_learned(scheduler: Scheduler, store: StateStore) -> None:
    """For the next start."""
    _save(scheduler, store, dump_output_lengths(scheduler.gate.lengths))


def _save(scheduler: Scheduler, store: StateStore, lengths: bytes) -> None:
    store.put(_CALIBRATIONS, dump_calibrations(scheduler.calibrations))
    store.put(_LENGTHS, lengths)


async def save_learned_forever(scheduler: Scheduler, store: StateStore) -> None:
    """Now and then, so that a crash costs a minute of learning; in pieces, for which no request waits long."""
    while True:
        await asyncio.sleep(_SAVE_EVERY_S)
        pieces = []
        for piece in pieces_of_output_lengths(scheduler.gate.lengths):
            pieces.append(piece)
            await asyncio.sleep(_BETWEEN_PIECES_S)
        try:
            _save(scheduler, store, b"".join(pieces))
        except OSError as error:
            _log.warning("what was learned could not be saved", reason=str(error))


def saved_calibrations(store: StateStore) -> dict[str, Calibration]:
    """Nothing where nothing usable was saved."""
    saved = store.get(_CALIBRATIONS)
    try:
        return load_calibrations(saved) if saved is not None else {}
    except ValueError as error:
        _log.warning("the saved calibration is ignored", reason=str(error))
        return {}


def saved_lengths(store: StateStore) -> OutputLengths:
    """Those learned before, or none."""
    saved = store.get(_LENGTHS)
    try:
        return load_output_lengths(saved) if saved is not None else OutputLengths()
    except ValueError as error:
        _log.warning("the saved lengths of answers are ignored", reason=str(error))
        return OutputLengths()
