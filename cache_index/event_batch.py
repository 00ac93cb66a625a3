"""The frame that engines and stores put around their events: msgpack ``[time, [events], rank]``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import isfinite
from struct import Struct
from typing import Final, Generic, TypeVar

import msgspec

Event = TypeVar("Event")

_decoder = msgspec.msgpack.Decoder()
_ARRAYS: Final = (0x92, 0x93)  # msgpack: two or three elements
_FLOAT64: Final = 0xCB
_DOUBLE: Final = Struct(">d")


class MalformedEventError(ValueError):
    """A payload or one of its events is not what the format says; ``field`` names the part at fault."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}")
        self.field = field
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Batch(Generic[Event]):
    """One message of a stream. ``rejected`` are events that could not be read; the others are good."""

    timestamp_s: float
    events: tuple[Event, ...]
    rank: int | None
    unknown_events: int
    rejected: tuple[MalformedEventError, ...]


def published_at(payload: bytes) -> float | None:
    """The time that a payload begins with, seconds of the publisher's clock; None where it has no such time."""
    if len(payload) < 10 or payload[0] not in _ARRAYS or payload[1] != _FLOAT64:
        return None
    (seconds,) = _DOUBLE.unpack_from(payload, 2)
    return float(seconds) if isfinite(seconds) else None


def read_batch(
    payload: bytes, read_event: Callable[[object], Event | None], *, ticks_per_s: int = 1
) -> Batch[Event]:
    """Read one payload. MalformedEventError if it is no batch at all; bad events are set aside.

    ``read_event`` returns None for an event of a type that it does not know.
    """
    try:
        batch = _decoder.decode(payload)
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        raise MalformedEventError("payload", str(error)) from error
    if not isinstance(batch, list) or len(batch) < 2:
        raise MalformedEventError("payload", "expected an array of time, events and rank")
    time, items = batch[0], batch[1]
    if isinstance(time, bool) or not isinstance(time, int | float):
        raise MalformedEventError("timestamp", f"expected a number, got {type(time).__name__}")
    if not isinstance(items, list):
        raise MalformedEventError("events", f"expected an array, got {type(items).__name__}")
    rank = batch[2] if len(batch) > 2 else None
    if rank is not None and not isinstance(rank, int):
        raise MalformedEventError("data_parallel_rank", f"expected an integer, got {type(rank).__name__}")

    events: list[Event] = []
    rejected: list[MalformedEventError] = []
    unknown = 0
    for item in items:
        try:
            event = read_event(item)
        except MalformedEventError as error:
            rejected.append(error)
            continue
        if event is None:
            unknown += 1
        else:
            events.append(event)
    return Batch(time / ticks_per_s, tuple(events), rank, unknown, tuple(rejected))
