"""Ended spans on their way to a collector: a bounded queue, and a thread that sends what is in it.

Unlike the SDK's own batch processor it counts what is lost, and why.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterator

import structlog
from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

_log = structlog.get_logger("router")
_EXPORTER_LOGGER = "opentelemetry.exporter.otlp.proto.http.trace_exporter"


class SpanQueue(SpanProcessor, Collector):
    """Never waits where spans end. The counts belong to two threads, each of which writes its own."""

    def __init__(
        self,
        exporter: SpanExporter,
        *,
        max_spans: int = 8_192,
        batch_spans: int = 512,
        interval_s: float = 1.0,
    ) -> None:
        self.dropped_full = 0
        self.dropped_failed = 0
        self.exported = 0
        self._exporter = exporter
        self._max_spans = max_spans
        self._batch_spans = batch_spans
        self._interval_s = interval_s
        self._spans: deque[ReadableSpan] = deque()
        self._reason = _FirstReason()
        self._failing = False
        self._closing = False
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="span-export", daemon=True)
        self._thread.start()

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        pass

    def on_end(self, span: ReadableSpan) -> None:
        waiting = len(self._spans)
        if waiting >= self._max_spans or self._closing:
            self.dropped_full += 1
            return
        self._spans.append(span)
        if waiting + 1 == self._batch_spans:
            self._wake.set()

    def shutdown(self, timeout_s: float = 3.0) -> None:
        """Send what is left, as far as there is time; then give up."""
        self._closing = True
        self._wake.set()
        self._thread.join(timeout_s)
        self._exporter.shutdown()  # also ends its waiting between attempts
        self._thread.join(timeout_s)

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        self._wake.set()
        return True

    def collect(self) -> Iterator[Metric]:
        yield CounterMetricFamily(
            "conductor_spans_exported", "Spans that the collector accepted.", self.exported
        )
        dropped = CounterMetricFamily(
            "conductor_spans_dropped", "Spans that were lost, and why.", labels=("reason",)
        )
        dropped.add_metric(("queue full",), self.dropped_full)
        dropped.add_metric(("export failed",), self.dropped_failed)
        yield dropped
        yield GaugeMetricFamily("conductor_spans_waiting", "Spans not sent yet.", len(self._spans))

    def _run(self) -> None:
        own = logging.getLogger(_EXPORTER_LOGGER)
        own.addFilter(self._reason)
        try:
            while not self._closing:
                self._wake.wait(self._interval_s)
                self._wake.clear()
                self._send_all()
            self._send_all()
        finally:
            own.removeFilter(self._reason)

    def _send_all(self) -> None:
        spans = self._spans
        while spans:
            batch = [spans.popleft() for _ in range(min(len(spans), self._batch_spans))]
            try:
                sent = self._exporter.export(batch) is SpanExportResult.SUCCESS
            except Exception as error:  # an exporter's fault must not end the thread
                self._reason.note(str(error))
                sent = False
            if sent:
                self.exported += len(batch)
            else:
                self.dropped_failed += len(batch)
            self._tell(sent)
            if not sent and self._closing:
                self.dropped_failed += len(spans)
                spans.clear()

    def _tell(self, sent: bool) -> None:
        """One line when it begins to fail, and one when it works again."""
        if sent == self._failing:
            self._failing = not sent
            if sent:
                _log.info("spans are exported again", dropped=self.dropped_failed + self.dropped_full)
            else:
                _log.warning("spans cannot be exported and are dropped", reason=self._reason.text)
        if sent:
            self._reason.text = ""


class _FirstReason(logging.Filter):
    """Keeps the exporter's first word on a failure instead of letting it log every attempt."""

    def __init__(self) -> None:
        super().__init__()
        self.text = ""

    def filter(self, record: logging.LogRecord) -> bool:
        self.note(record.getMessage())
        return False

    def note(self, text: str) -> None:
        self.text = self.text or text
