"""What a client may say of its request's place among the others, in ``x-conductor-*`` header fields."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Final

from router.api_keys import ApiKey
from router.errors import RequestError
from router.heads import Headers

PREFIX: Final = b"x-conductor-"
_TENANT = re.compile(rb"[\x21-\x7e]{1,128}")
_PRIORITIES = range(-8, 9)


@dataclass(frozen=True, slots=True)
class RequestTerms:
    """Whose request it is, how urgent, and objectives of its own."""

    tenant: str = "default"
    priority: int = 0
    ttft_objective_s: float | None = None
    tbt_objective_s: float | None = None


DEFAULT_TERMS: Final = RequestTerms()


def parse_terms(headers: Headers, key: ApiKey | None = None) -> RequestTerms:
    """The tenant of a request with a ``key`` is the key's, and its priority no higher than the key's.

    Raises RequestError (400) naming the field and what it may be.
    """
    given = {name[len(PREFIX) :]: value for name, value in headers if name.startswith(PREFIX)}
    if not given:
        return DEFAULT_TERMS if key is None else RequestTerms(key.tenant, key.priority)
    priority = _priority(given.get(b"priority"))
    if key is not None:
        priority = min(priority, key.priority) if b"priority" in given else key.priority
    return RequestTerms(
        tenant=_tenant(given.get(b"tenant", b"default")) if key is None else key.tenant,
        priority=priority,
        ttft_objective_s=_objective_s("ttft-objective-ms", given.get(b"ttft-objective-ms")),
        tbt_objective_s=_objective_s("tbt-objective-ms", given.get(b"tbt-objective-ms")),
    )


def _tenant(value: bytes) -> str:
    if not _TENANT.fullmatch(value):
        _refuse("tenant", "must be 1 to 128 printable characters without spaces", value)
    return value.decode("ascii")


def _priority(value: bytes | None) -> int:
    if value is None:
        return 0
    try:
        priority = int(value)
    except ValueError:
        priority = _PRIORITIES.stop
    if priority not in _PRIORITIES:
        _refuse("priority", "must be a whole number from -8 to 8, the higher the sooner", value)
    return priority


def _objective_s(name: str, value: bytes | None) -> float | None:
    if value is None:
        return None
    try:
        milliseconds = float(value)
    except ValueError:
        milliseconds = math.nan
    if not 0 < milliseconds < math.inf:
        _refuse(name, "must be a positive number of milliseconds", value)
    return milliseconds / 1e3


def _refuse(name: str, rule: str, value: bytes) -> None:
    field = f"x-conductor-{name}"
    shown = value[:64].decode("latin-1")
    raise RequestError(
        400, f"The header {field!r} {rule}, not {shown!r}.", param=field, code="invalid_header"
    )
