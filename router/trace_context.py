"""The W3C Trace Context header fields ``traceparent`` and ``tracestate`` (Recommendation of 23 November 2021)."""

from __future__ import annotations

import re

from opentelemetry.trace import SpanContext, TraceFlags, TraceState

from router.heads import Headers

_TRACEPARENT = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_MAX_STATE_BYTES = 512  # that must be passed on; a longer one still passes, but is not recorded


def parent_of(headers: Headers) -> SpanContext | None:
    """The caller's span; None where there is none, or more than one, or one that is malformed."""
    given = [value for name, value in headers if name == b"traceparent"]
    if len(given) != 1:
        return None
    found = _TRACEPARENT.fullmatch(given[0].strip())
    if found is None:
        return None
    version, trace_id, span_id, flags, more = found.groups()
    if version == b"ff" or (version == b"00" and more):
        return None
    context = SpanContext(
        int(trace_id, 16),
        int(span_id, 16),
        is_remote=True,
        trace_flags=TraceFlags(int(flags, 16)),
        trace_state=_state(headers),
    )
    return context if context.is_valid else None


def traceparent_line(context: SpanContext) -> bytes:
    return b"traceparent: 00-%032x-%016x-%02x\r\n" % (
        context.trace_id,
        context.span_id,
        context.trace_flags & 0xFF,
    )


def _state(headers: Headers) -> TraceState | None:
    given = [value.decode("latin-1") for name, value in headers if name == b"tracestate"]
    if not given or sum(map(len, given)) > _MAX_STATE_BYTES:
        return None
    return TraceState.from_header(given)
