"""What an engine says it used, read from the last bytes of its response."""

from __future__ import annotations

import re

from conductor.placement import Usage

_USAGE_BYTES = 2_048  # of the object, from its start

_USAGE = re.compile(rb'"usage"\s*:\s*\{')
_PROMPT = re.compile(rb'"prompt_tokens"\s*:\s*(\d+)')
_OUTPUT = re.compile(rb'"completion_tokens"\s*:\s*(\d+)')
_CACHED = re.compile(rb'"cached_tokens"\s*:\s*(\d+)')

NO_USAGE = Usage()


def usage_from_tail(tail: bytes) -> Usage:
    """Read the last ``usage`` object in ``tail``, which may begin in the middle of a response.

    Quotes inside generated text are escaped in JSON, so text cannot be mistaken for the object.
    """
    at = tail.rfind(b'"usage":{')
    if at < 0:
        at = tail.rfind(b'"usage"')
        if at < 0 or _USAGE.match(tail, at) is None:
            return NO_USAGE
    usage = tail[at : at + _USAGE_BYTES]
    return Usage(
        prompt_tokens=_number(_PROMPT, usage),
        output_tokens=_number(_OUTPUT, usage),
        cached_tokens=_number(_CACHED, usage),
    )


def _number(pattern: re.Pattern[bytes], text: bytes) -> int | None:
    match = pattern.search(text)
    return int(match[1]) if match else None
