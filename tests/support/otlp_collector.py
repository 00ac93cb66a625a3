"""A collector that takes OTLP over HTTP and keeps the spans it was sent."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span as SpanMessage


@dataclass
class CollectedSpan:
    name: str
    kind: str
    trace_id: str
    span_id: str
    parent_id: str
    state: str
    attributes: dict[str, Any]
    events: list[str]
    error: str | None
    start_s: float
    end_s: float
    resource: dict[str, Any]


class Collector:
    def __init__(self) -> None:
        self.spans: list[CollectedSpan] = []
        self.status = 200
        self.paths: list[str] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                collector.paths.append(self.path)
                if collector.status == 200:
                    collector.take(ExportTraceServiceRequest.FromString(body))
                self.send_response(collector.status)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def take(self, request: ExportTraceServiceRequest) -> None:
        for of_resource in request.resource_spans:
            resource = {each.key: _value(each.value) for each in of_resource.resource.attributes}
            for scope in of_resource.scope_spans:
                self.spans += [_collected(span, resource) for span in scope.spans]

    def named(self, name: str) -> list[CollectedSpan]:
        return [span for span in self.spans if span.name == name]

    def one(self, name: str) -> CollectedSpan:
        found = self.named(name)
        assert len(found) == 1, f"{len(found)} spans are called {name!r}: {[s.name for s in self.spans]}"
        return found[0]

    def wait_for(self, spans: int, within_s: float = 20.0) -> None:
        deadline_s = time.monotonic() + within_s
        while len(self.spans) < spans:
            assert time.monotonic() < deadline_s, f"only {[s.name for s in self.spans]}"
            time.sleep(0.01)


def _value(value: Any) -> Any:
    return getattr(value, value.WhichOneof("value"))


def _collected(span: SpanMessage, resource: dict[str, Any]) -> CollectedSpan:
    return CollectedSpan(
        name=span.name,
        kind=SpanMessage.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_"),
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        state=span.trace_state,
        attributes={each.key: _value(each.value) for each in span.attributes},
        events=[event.name for event in span.events],
        error=span.status.message if span.status.code == span.status.STATUS_CODE_ERROR else None,
        start_s=span.start_time_unix_nano / 1e9,
        end_s=span.end_time_unix_nano / 1e9,
        resource=resource,
    )


@contextmanager
def otlp_collector() -> Iterator[Collector]:
    collector = Collector()
    thread = threading.Thread(target=collector.server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield collector
    finally:
        collector.server.shutdown()
        thread.join()
        collector.server.server_close()
