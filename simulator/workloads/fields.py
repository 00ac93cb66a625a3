"""Checked access to the fields of one line, with errors that name file, line and field."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import orjson

from simulator.workloads.records import TraceError

_ONLY_INTEGERS: Final = {int}  # JSON's true and false are no integers


def json_object(line: bytes, place: str) -> dict[str, Any]:
    try:
        fields = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise TraceError(f"{place}: not valid JSON, perhaps cut off: {error}") from None
    if not isinstance(fields, dict):
        raise TraceError(f"{place}: not a JSON object")
    return fields


def count_field(place: str, fields: Mapping[str, Any], name: str, *, minimum: int) -> int:
    value = fields.get(name)
    if type(value) is not int or value < minimum:
        raise fault(place, fields, name, f"an integer from {minimum}")
    return value


def time_field(place: str, fields: Mapping[str, Any], name: str, unit: str) -> float:
    value = fields.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise fault(place, fields, name, f"a number of {unit} from 0")
    return value


def hash_ids_field(place: str, fields: Mapping[str, Any]) -> tuple[int, ...]:
    ids = fields.get("hash_ids")
    if not isinstance(ids, list) or (ids and (set(map(type, ids)) != _ONLY_INTEGERS or min(ids) < 0)):
        raise fault(place, fields, "hash_ids", "a list of integers from 0")
    return tuple(ids)


def text_number(place: str, fields: Mapping[str, Any], name: str) -> float:
    """A number from 0 out of a CSV column."""
    try:
        value = float(fields[name])
    except (KeyError, TypeError, ValueError):
        value = math.nan
    if not 0 <= value < math.inf:
        raise fault(place, fields, name, "a number from 0")
    return value


def text_count(place: str, fields: Mapping[str, Any], name: str) -> int:
    """An integer from 0 out of a CSV column; ``12.0`` is one."""
    value = text_number(place, fields, name)
    if value != int(value):
        raise fault(place, fields, name, "an integer from 0")
    return int(value)


def fault(place: str, fields: Mapping[str, Any], name: str, wanted: str) -> TraceError:
    """The error for a field that is absent or not what is ``wanted``."""
    if fields.get(name) is None and name not in fields:
        return TraceError(f"{place}: field {name!r} is missing; it must be {wanted}")
    shown = repr(fields[name])
    shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
    return TraceError(f"{place}: field {name!r} is {shown}, not {wanted}")
