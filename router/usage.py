"""What an engine says it used, read from the last bytes of its response."""

from __future__ import annotations

import re

from conductor.placement import Usage

_USAGE_BYTES = 2_048  # of the object, from its start
_META_BYTES = 1_024  # before the answer's length, where SGLang may have told the prompt's

_USAGE = re.compile(rb'"usage"\s*:\s*\{')
_COUNT = re.compile(
    rb'"(prompt_tokens|completion_tokens|cached_tokens|input_tokens|output_tokens'
    rb'|cache_read_input_tokens|cache_creation_input_tokens)"\s*:\s*(\d{1,15})(?!\d)'
)

NO_USAGE = Usage()


def usage_from_tail(tail: bytes) -> Usage:
    """Read the last ``usage`` object in ``tail``, which may begin in the middle of a response.

    Where there is none, SGLang's ``meta_info`` is read, whose counts may stand behind many log probabilities.
    Quotes inside generated text are escaped in JSON, so text cannot be mistaken for the object. In Anthropic's
    API ``input_tokens`` are those that no cache had; the names of the Responses API are the same otherwise.
    """
    at = tail.rfind(b'"usage":{')
    if at < 0:
        at = tail.rfind(b'"usage"')
        if at < 0 or _USAGE.match(tail, at) is None:
            at = tail.rfind(b'"completion_tokens":')
            if at < 0:
                return NO_USAGE
            at = max(at - _META_BYTES, 0)
    counts = dict(_COUNT.findall(tail, at, at + _USAGE_BYTES))
    if b"input_tokens" not in counts:
        prompt, output = counts.get(b"prompt_tokens"), counts.get(b"completion_tokens")
        cached = counts.get(b"cached_tokens")
        return Usage(
            None if prompt is None else int(prompt),
            None if output is None else int(output),
            None if cached is None else int(cached),
        )
    read = _number(counts, b"cache_read_input_tokens")
    written = _number(counts, b"cache_creation_input_tokens")
    return Usage(
        prompt_tokens=int(counts[b"input_tokens"]) + (read or 0) + (written or 0),
        output_tokens=_number(counts, b"output_tokens"),
        cached_tokens=_number(counts, b"cached_tokens") if read is None else read,
    )


def _number(counts: dict[bytes, bytes], name: bytes) -> int | None:
    digits = counts.get(name)
    return None if digits is None else int(digits)
