"""Requests as OpenTelemetry spans: one of the server, and children for tokens, placement and each leg.

Attributes are named by the semantic conventions for HTTP and generative AI (their generative AI part is in
development), and `conductor.*` where those have no name. Nothing of prompts and answers is recorded.
"""

from __future__ import annotations

from typing import Final

from opentelemetry.context import Context
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import NonRecordingSpan, Span, SpanContext, SpanKind, Tracer, set_span_in_context
from opentelemetry.trace.status import Status, StatusCode
from opentelemetry.util.types import AttributeValue

from conductor.placement import Placement, Target, Usage
from router.heads import Headers
from router.inference import Endpoint, InferenceRequest
from router.request_trace import RequestTrace
from router.tokens import Prompt
from router.trace_context import parent_of, traceparent_line

_OPERATIONS: Final = {
    Endpoint.CHAT: "chat",
    Endpoint.RESPONSES: "chat",
    Endpoint.MESSAGES: "chat",
    Endpoint.COMPLETIONS: "text_completion",
    Endpoint.TOKENS: "text_completion",
    Endpoint.GENERATE: "text_completion",
    Endpoint.EMBEDDINGS: "embeddings",
    Endpoint.RERANK: "rerank",
    Endpoint.SCORE: "score",
    Endpoint.TOKENIZE: "tokenize",
    Endpoint.DETOKENIZE: "detokenize",
}


class SpanTracing:
    """Makes the spans with the provider's sampler; ending a span hands it to the provider's processors."""

    def __init__(self, provider: TracerProvider) -> None:
        self._tracer: Tracer = provider.get_tracer("conductor.router")

    def begin(self, endpoint: Endpoint, headers: Headers, request_id: str) -> RequestTrace:
        parent = parent_of(headers)
        context = Context()
        if parent is not None:
            context = set_span_in_context(NonRecordingSpan(parent), context)
        attributes: dict[str, AttributeValue] = {
            "http.request.method": "POST",
            "http.route": endpoint.value,
            "gen_ai.operation.name": _OPERATIONS[endpoint],
            "conductor.request_id": request_id,
        }
        span = self._tracer.start_span(
            f"POST {endpoint.value}", context, kind=SpanKind.SERVER, attributes=attributes
        )
        if span.is_recording():
            return RecordedTrace(self._tracer, span, continued=parent is not None)
        return UnrecordedTrace(span.get_span_context(), continued=parent is not None)


class UnrecordedTrace:
    """A request that is not sampled: engines are told, so that none of them samples it alone."""

    __slots__ = ("_continued", "_own")

    def __init__(self, own: SpanContext, *, continued: bool) -> None:
        self._own = own
        self._continued = continued

    @property
    def trace_id(self) -> str:
        return f"{self._own.trace_id:032x}"

    def engine_headers(self, headers: Headers) -> Headers:
        return _without_parent(headers, keep_state=self._continued)

    def tokenizing(self, request: InferenceRequest) -> None:
        pass

    def placing(self, prompt: Prompt) -> None:
        pass

    def placed(self, placement: Placement) -> None:
        pass

    def leg(self, target: Target, *, beside: bool = False) -> bytes:
        return traceparent_line(self._own)

    def answered(self, status: int) -> None:
        pass

    def answered_beside(self, status: int) -> None:
        pass

    def settled(self, *, first: bool) -> None:
        pass

    def failed(self, kind: str, detail: str) -> None:
        pass

    def end(self, status: int, usage: Usage, *, attempts: int, first_byte_after_s: float | None) -> None:
        pass


class RecordedTrace:
    """A sampled request: ``_step`` is the child span that is open, ``_beside`` one that was begun before it."""

    __slots__ = ("_beside", "_context", "_continued", "_placement", "_server", "_step", "_tracer")

    def __init__(self, tracer: Tracer, server: Span, *, continued: bool) -> None:
        self._tracer = tracer
        self._server = server
        self._context = set_span_in_context(server, Context())
        self._continued = continued
        self._placement: Placement | None = None
        self._step: Span | None = None
        self._beside: Span | None = None

    @property
    def trace_id(self) -> str:
        return f"{self._server.get_span_context().trace_id:032x}"

    def engine_headers(self, headers: Headers) -> Headers:
        return _without_parent(headers, keep_state=self._continued)

    def tokenizing(self, request: InferenceRequest) -> None:
        attributes: dict[str, AttributeValue] = {"gen_ai.request.model": request.model}
        if request.endpoint.generates:
            attributes["gen_ai.request.stream"] = request.stream
            if request.max_output_tokens is not None:
                attributes["gen_ai.request.max_tokens"] = request.max_output_tokens
        self._server.set_attributes(attributes)
        self._begin("tokenize", SpanKind.INTERNAL)

    def placing(self, prompt: Prompt) -> None:
        step = self._begin("place", SpanKind.INTERNAL)
        step.set_attribute("conductor.token_source", prompt.source.value)
        step.set_attribute("conductor.prompt_tokens", prompt.prompt_tokens)

    def placed(self, placement: Placement) -> None:
        self._placement = placement
        attributes: dict[str, AttributeValue] = {
            "conductor.placement.id": placement.placement_id,
            "conductor.prefill.instance": placement.prefill.instance_id,
            "conductor.prefill.rank": placement.prefill.rank,
            "conductor.decode.instance": placement.decode.instance_id,
            "conductor.decode.rank": placement.decode.rank,
            "conductor.overlap_tokens": placement.overlap_tokens,
            "conductor.predicted_ttft_s": placement.predicted_ttft_s,
            "conductor.predicted_tbt_s": placement.predicted_tbt_s,
        }
        if not placement.placement_id:  # nothing was reserved, nor predicted
            attributes = {name: value for name, value in attributes.items() if name.endswith("instance")}
        if self._step is not None:
            self._step.set_attributes(attributes)
        self._server.set_attributes(attributes)

    def leg(self, target: Target, *, beside: bool = False) -> bytes:
        if beside:
            self._beside, self._step = self._step, None
        placement = self._placement
        if placement is None or not placement.disaggregated:
            name = "engine"
        else:
            name = "prefill" if target is placement.prefill else "decode"
        step = self._begin(name, SpanKind.CLIENT)
        step.set_attribute("server.address", target.host)
        step.set_attribute("server.port", target.port)
        step.set_attribute("conductor.instance", target.instance_id)
        return traceparent_line(step.get_span_context())

    def answered(self, status: int) -> None:
        if self._step is not None:
            self._step.add_event("first byte")
            self._step.set_attribute("http.response.status_code", status)

    def answered_beside(self, status: int) -> None:
        if self._beside is not None:
            self._beside.set_attribute("http.response.status_code", status)
        self._end_beside()

    def settled(self, *, first: bool) -> None:
        if first:
            self._step, self._beside = self._beside, self._step
        if self._beside is not None:
            self._beside.set_attribute("conductor.given_up", True)
        self._end_beside()

    def failed(self, kind: str, detail: str) -> None:
        self._end_beside()
        step, self._step = self._step, None
        if step is not None:
            step.set_attribute("error.type", kind)
            step.set_status(Status(StatusCode.ERROR, detail))
            step.end()

    def end(self, status: int, usage: Usage, *, attempts: int, first_byte_after_s: float | None) -> None:
        self._end_beside()
        if self._step is not None:
            self._step.end()
            self._step = None
        attributes: dict[str, AttributeValue] = {
            "http.response.status_code": status,
            "conductor.attempts": attempts,
        }
        for name, value in (
            ("gen_ai.usage.input_tokens", usage.prompt_tokens),
            ("gen_ai.usage.output_tokens", usage.output_tokens),
            ("gen_ai.usage.cache_read.input_tokens", usage.cached_tokens),
            ("gen_ai.response.time_to_first_chunk", first_byte_after_s),
        ):
            if value is not None:
                attributes[name] = value
        if self._placement is not None:
            attributes["gen_ai.response.model"] = self._placement.model
        self._server.set_attributes(attributes)
        if status >= 500:
            self._server.set_attribute("error.type", str(status))
            self._server.set_status(Status(StatusCode.ERROR))
        self._server.end()

    def _end_beside(self) -> None:
        beside, self._beside = self._beside, None
        if beside is not None:
            beside.end()

    def _begin(self, name: str, kind: SpanKind) -> Span:
        if self._step is not None:
            self._step.end()
        step = self._step = self._tracer.start_span(name, self._context, kind=kind)
        return step


def _without_parent(headers: Headers, *, keep_state: bool) -> Headers:
    """``tracestate`` says nothing without the ``traceparent`` that it came with."""
    return [
        (name, value)
        for name, value in headers
        if name != b"traceparent" and (keep_state or name != b"tracestate")
    ]
