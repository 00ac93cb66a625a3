"""What a client may say of its request's place among the others, in ``x-conductor-*`` header fields.

Three of llm-d's are understood as well; where both are sent, ours count.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Final, NoReturn

from router.api_keys import ApiKey
from router.errors import RequestError
from router.heads import Headers

PREFIX: Final = b"x-conductor-"
_LLM_D_PREFIX: Final = b"x-llm-d-"
_LLM_D: Final = {
    b"x-llm-d-slo-ttft-ms": b"ttft-objective-ms",
    b"x-llm-d-slo-tpot-ms": b"tbt-objective-ms",
    b"x-llm-d-inference-fairness-id": b"tenant",
}
_PREFIXES: Final = (PREFIX, _LLM_D_PREFIX)
_NAME = re.compile(rb"[\x21-\x7e]{1,128}")
_PRIORITIES = range(-8, 9)

_Field = tuple[bytes, bytes]  # as it was sent: name and value
_Given = dict[bytes, _Field]


@dataclass(frozen=True, slots=True)
class RequestTerms:
    """Whose request it is, how urgent, and objectives of its own.

    ``route`` names the kind of work, where the client says so: answer lengths and returns are learned by it.
    """

    tenant: str = "default"
    priority: int = 0
    ttft_objective_s: float | None = None
    tbt_objective_s: float | None = None
    route: str | None = None


DEFAULT_TERMS: Final = RequestTerms()


def parse_terms(headers: Headers, key: ApiKey | None = None) -> RequestTerms:
    """The tenant of a request with a ``key`` is the key's, and its priority no higher than the key's.

    Raises RequestError (400) naming the field and what it may be.
    """
    given: _Given = {}
    for name, value in headers:
        if name.startswith(_PREFIXES):
            if name.startswith(PREFIX):
                given[name[len(PREFIX) :]] = (name, value)
            elif name in _LLM_D:
                given.setdefault(_LLM_D[name], (name, value))
    if not given:
        return DEFAULT_TERMS if key is None else RequestTerms(key.tenant, key.priority)
    priority = _priority(given.get(b"priority"))
    if key is not None:
        priority = min(priority, key.priority) if b"priority" in given else key.priority
    return RequestTerms(
        tenant=_tenant(given.get(b"tenant")) if key is None else key.tenant,
        priority=priority,
        ttft_objective_s=_objective_s(given.get(b"ttft-objective-ms")),
        tbt_objective_s=_objective_s(given.get(b"tbt-objective-ms")),
        route=_name(given.get(b"route")),
    )


def _tenant(field: _Field | None) -> str:
    return _name(field) or "default"


def _name(field: _Field | None) -> str | None:
    if field is None:
        return None
    if not _NAME.fullmatch(field[1]):
        _refuse(field, "must be 1 to 128 printable characters without spaces")
    return field[1].decode("ascii")


def _priority(field: _Field | None) -> int:
    if field is None:
        return 0
    try:
        priority = int(field[1])
    except ValueError:
        priority = _PRIORITIES.stop
    if priority not in _PRIORITIES:
        _refuse(field, "must be a whole number from -8 to 8, the higher the sooner")
    return priority


def _objective_s(field: _Field | None) -> float | None:
    if field is None:
        return None
    try:
        milliseconds = float(field[1])
    except ValueError:
        milliseconds = math.nan
    if not 0 < milliseconds < math.inf:
        _refuse(field, "must be a positive number of milliseconds")
    return milliseconds / 1e3


def _refuse(field: _Field, rule: str) -> NoReturn:
    name = field[0].decode("latin-1")
    shown = field[1][:64].decode("latin-1")
    raise RequestError(400, f"The header {name!r} {rule}, not {shown!r}.", param=name, code="invalid_header")
