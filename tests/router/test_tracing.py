"""Traces of requests: the spans that a collector gets, and what engines are told to join them."""

import asyncio
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import orjson
import pytest
import structlog
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from otlp_collector import Collector, otlp_collector

from router.request_spans import SpanTracing
from router.span_export import SpanQueue

CHAT = "/v1/chat/completions"
SERVER = f"POST {CHAT}"
TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAMPLED = {"traceparent": f"00-{TRACE}-{SPAN}-01", "tracestate": "vendor=a,other=b"}
UNSAMPLED = {"traceparent": f"00-{TRACE}-{SPAN}-00"}

Trace = Callable[..., tuple[SpanTracing, SpanQueue]]


@pytest.fixture
def collector() -> Iterator[Collector]:
    with otlp_collector() as collector:
        yield collector


@pytest.fixture
async def trace() -> AsyncIterator[Trace]:
    async with AsyncExitStack() as stack:

        def make(exporter: SpanExporter, ratio: float = 1.0, **options: Any) -> tuple[SpanTracing, SpanQueue]:
            queue = SpanQueue(exporter, interval_s=0.01, **options)
            stack.push_async_callback(asyncio.to_thread, queue.shutdown)
            provider = TracerProvider(sampler=ParentBased(TraceIdRatioBased(ratio)), shutdown_on_exit=False)
            provider.add_span_processor(queue)
            return SpanTracing(provider), queue

        yield make


def to(collector: Collector) -> OTLPSpanExporter:
    return OTLPSpanExporter(endpoint=f"{collector.url}/v1/traces", timeout=2)


async def collected(collector: Collector, spans: int) -> None:
    await asyncio.to_thread(collector.wait_for, spans)


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_handed_off_request(cluster: Any, collector: Collector, trace: Trace, streamed: bool) -> None:
    prefill, decode = await cluster.engine("p"), await cluster.engine("d")
    tracing, _ = trace(to(collector))
    door = await cluster.door([prefill], [decode], tracing=tracing)
    body = cluster.chat_document(stream=streamed, max_tokens=9)
    response = await door.client.post(CHAT, json=body, headers={**SAMPLED, "x-request-id": "r-1"})
    assert response.status_code == 200
    await collected(collector, 5)
    server = collector.one(SERVER)
    assert (server.kind, server.trace_id, server.parent_id) == ("SERVER", TRACE, SPAN)
    assert server.state == SAMPLED["tracestate"]
    assert server.attributes.pop("gen_ai.response.time_to_first_chunk") > 0
    assert server.attributes == {
        "http.request.method": "POST",
        "http.route": CHAT,
        "http.response.status_code": 200,
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": cluster.MODEL,
        "gen_ai.request.stream": streamed,
        "gen_ai.request.max_tokens": 9,
        "gen_ai.response.model": cluster.MODEL,
        "gen_ai.usage.input_tokens": 12,
        "gen_ai.usage.output_tokens": 5,
        "gen_ai.usage.cache_read.input_tokens": 8,
        "conductor.request_id": "r-1",
        "conductor.attempts": 1,
        "conductor.placement.id": "p-1",
        "conductor.prefill.instance": "p",
        "conductor.prefill.rank": 0,
        "conductor.decode.instance": "d",
        "conductor.decode.rank": 0,
        "conductor.overlap_tokens": 16,
        "conductor.predicted_ttft_s": 0.0125,
        "conductor.predicted_tbt_s": 0.01,
    }
    steps = [collector.one(name) for name in ("tokenize", "place", "prefill", "decode")]
    assert all(step.parent_id == server.span_id and step.trace_id == TRACE for step in steps)
    assert [step.kind for step in steps] == ["INTERNAL", "INTERNAL", "CLIENT", "CLIENT"]
    times = [server.start_s, *(t for step in steps for t in (step.start_s, step.end_s)), server.end_s]
    assert times == sorted(times)
    assert steps[1].attributes["conductor.placement.id"] == "p-1"
    for step, engine in zip(steps[2:], (prefill, decode), strict=True):
        assert step.attributes == {
            "server.address": "127.0.0.1",
            "server.port": engine.port,
            "conductor.instance": engine.instance_id,
            "http.response.status_code": 200,
        }
        (received,) = engine.received
        assert received.header("traceparent") == f"00-{TRACE}-{step.span_id}-01"
        assert received.header("tracestate") == SAMPLED["tracestate"]


async def test_legs_that_are_sent_together(cluster: Any, collector: Collector, trace: Trace) -> None:
    async def later(request: Any, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.1)
        writer.write(cluster.json_response(orjson.dumps(cluster.ANSWER)))

    prefill, decode = await cluster.engine("p"), await cluster.engine("d", later)
    targets = [replace(engine.target, protocol="sglang") for engine in (prefill, decode)]
    tracing, _ = trace(to(collector))
    door = await cluster.door(targets[:1], targets[1:], tracing=tracing)
    assert (await door.chat()).status_code == 200
    await collected(collector, 5)
    server = collector.one(SERVER)
    first, second = collector.one("prefill"), collector.one("decode")
    assert first.parent_id == second.parent_id == server.span_id
    assert first.start_s <= second.start_s < first.end_s < second.end_s
    for step, engine in ((first, prefill), (second, decode)):
        assert step.attributes["conductor.instance"] == engine.instance_id
        assert step.attributes["http.response.status_code"] == 200
        assert step.span_id in engine.received[0].header("traceparent")


@pytest.mark.parametrize("winner", ["e0", "e1"])
async def test_a_second_instance(cluster: Any, collector: Collector, trace: Trace, winner: str) -> None:
    def thinking(seconds: float) -> Any:
        async def respond(request: Any, writer: asyncio.StreamWriter) -> None:
            await asyncio.sleep(seconds)
            writer.write(cluster.json_response(orjson.dumps(cluster.ANSWER)))

        return respond

    names = ("e0", "e1")
    engines = [await cluster.engine(name, thinking(0.4 if name == winner else 30)) for name in names]
    tracing, _ = trace(to(collector))
    door = await cluster.door(engines, tracing=tracing, hedge_quantile=0.9, hedge_least_s=0.05)
    for _ in range(64):
        door.services.first_bytes.observe(cluster.MODEL, False, 0.001)
    assert (await door.chat()).headers["x-conductor-decode-instance"] == winner
    await collected(collector, 5)
    server = collector.one(SERVER)
    legs = {span.attributes["conductor.instance"]: span for span in collector.named("engine")}
    assert server.attributes["conductor.decode.instance"] == winner
    assert server.attributes["conductor.attempts"] == 2
    loser = next(name for name in names if name != winner)
    assert legs[winner].attributes["http.response.status_code"] == 200
    assert legs[loser].attributes["conductor.given_up"] is True
    assert "conductor.given_up" not in legs[winner].attributes
    assert legs["e0"].start_s < legs["e1"].start_s < legs[loser].end_s


async def test_a_mixed_instance_and_a_new_trace(cluster: Any, collector: Collector, trace: Trace) -> None:
    engine = await cluster.engine()
    tracing, queue = trace(to(collector))
    door = await cluster.door([engine], tracing=tracing)
    door.services.metrics.registry.register(queue)
    await door.chat()
    await collected(collector, 4)
    leg, server = collector.one("engine"), collector.one(SERVER)
    assert server.parent_id == ""
    assert engine.received[0].header("traceparent") in (
        f"00-{leg.trace_id}-{leg.span_id}-01",
        f"00-{leg.trace_id}-{leg.span_id}-03",  # trace ids are random: Trace Context, level 2
    )
    await cluster.wait_until(lambda: door.sample("conductor_spans_exported_total") == 4)
    assert door.sample("conductor_spans_dropped_total", reason="queue full") == 0


async def test_a_parent_that_is_not_sampled(cluster: Any, collector: Collector, trace: Trace) -> None:
    prefill, decode = await cluster.engine("p"), await cluster.engine("d")
    tracing, _ = trace(to(collector))
    door = await cluster.door([prefill], [decode], tracing=tracing)
    await door.client.post(CHAT, json=cluster.chat_document(), headers=UNSAMPLED)
    await door.client.post(CHAT, json=cluster.chat_document(), headers=SAMPLED)
    await collected(collector, 5)
    assert len(collector.spans) == 5
    for engine in (prefill, decode):
        version, trace_id, _, flags = engine.received[0].header("traceparent").split("-")
        assert (version, trace_id, int(flags, 16) & 1) == ("00", TRACE, 0)


async def test_none_is_sampled(cluster: Any, collector: Collector, trace: Trace) -> None:
    prefill, decode = await cluster.engine("p"), await cluster.engine("d")
    tracing, queue = trace(to(collector), ratio=0.0)
    door = await cluster.door([prefill], [decode], tracing=tracing)
    await door.chat()
    first, second = (engine.received[0].header("traceparent") for engine in (prefill, decode))
    assert first == second and int(first[-2:], 16) & 1 == 0
    await asyncio.to_thread(queue.shutdown)
    assert not collector.spans and not collector.paths


@pytest.mark.parametrize(
    "traceparent",
    [
        "nonsense",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01-more",
        f"00-{TRACE.upper()}-{SPAN}-01",
    ],
)
async def test_a_malformed_parent_begins_a_new_trace(
    cluster: Any, collector: Collector, trace: Trace, traceparent: str
) -> None:
    engine = await cluster.engine()
    tracing, _ = trace(to(collector))
    door = await cluster.door([engine], tracing=tracing)
    headers = {"traceparent": traceparent, "tracestate": "vendor=a"}
    await door.client.post(CHAT, json=cluster.chat_document(), headers=headers)
    await collected(collector, 4)
    leg = collector.one("engine")
    assert collector.one(SERVER).parent_id == "" and leg.trace_id != TRACE
    assert leg.span_id in engine.received[0].header("traceparent")
    assert engine.received[0].header("tracestate") is None


async def test_without_tracing_both_legs_get_the_clients_context(cluster: Any) -> None:
    prefill, decode = await cluster.engine("p"), await cluster.engine("d")
    door = await cluster.door([prefill], [decode])
    await door.client.post(CHAT, json=cluster.chat_document(), headers=SAMPLED)
    for engine in (prefill, decode):
        for name, value in SAMPLED.items():
            assert engine.received[0].header(name) == value


def test_without_tracing_nothing_is_imported() -> None:
    program = (
        "import sys, router, conductor.cli.tracing as t\n"
        "from conductor.config import Config\n"
        "assert t.start_tracing(Config().tracing, {}, None, None) is None\n"
        "sys.exit(any(n.startswith(('opentelemetry.sdk', 'opentelemetry.exporter')) for n in sys.modules))"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


async def test_attempts_that_fail(cluster: Any, collector: Collector, trace: Trace) -> None:
    async def broken(request: Any, writer: asyncio.StreamWriter) -> None:
        writer.write(cluster.json_response(b"out of memory", status="500 Broken"))

    tracing, _ = trace(to(collector))
    bad, good = await cluster.engine("bad", broken), await cluster.engine("good")
    door = await cluster.door([bad, good], tracing=tracing)
    assert (await door.chat()).status_code == 200
    await collected(collector, 6)
    assert len(collector.named("place")) == 2
    first, second = collector.named("engine")
    assert (first.attributes["error.type"], first.error) == ("error", "HTTP 500: out of memory")
    assert (second.error, second.attributes["conductor.instance"]) == (None, "good")
    server = collector.one(SERVER)
    assert server.attributes["conductor.attempts"] == 2 and server.error is None
    collector.spans.clear()

    alone = await cluster.door([bad], tracing=tracing, max_attempts=1)
    assert (await alone.chat()).status_code == 502
    await collected(collector, 4)
    server = collector.one(SERVER)
    assert (server.attributes["error.type"], server.error) == ("502", "")


async def test_requests_that_are_refused(cluster: Any, collector: Collector, trace: Trace) -> None:
    tracing, _ = trace(to(collector))
    door = await cluster.door([await cluster.engine()], tracing=tracing)
    assert (await door.client.post(CHAT, content=b"{")).status_code == 400
    assert (await door.chat(model="unknown")).status_code == 404
    await collected(collector, 4)
    malformed, unknown = collector.named(SERVER)
    assert malformed.attributes["http.response.status_code"] == 400 and malformed.error is None
    assert unknown.attributes["gen_ai.request.model"] == "unknown"
    assert collector.one("place").attributes["error.type"] == "refused"


async def test_a_client_that_leaves(cluster: Any, collector: Collector, trace: Trace) -> None:
    async def hang(request: Any, writer: asyncio.StreamWriter) -> None:
        writer.write(cluster.STREAM_HEAD + cluster.chunk(cluster.event("a")))
        await writer.drain()
        await asyncio.sleep(30)

    tracing, _ = trace(to(collector))
    door = await cluster.door([await cluster.engine(respond=hang)], tracing=tracing)
    connection = await door.connect()
    connection.send(cluster.post(orjson.dumps(cluster.chat_document(stream=True))))
    await connection.reader.readuntil(b"\r\n\r\n")
    await connection.close()
    await collected(collector, 4)
    server = collector.one(SERVER)
    assert server.attributes["http.response.status_code"] == 499
    assert collector.one("engine").events == ["first byte"]


async def test_a_collector_that_is_away(cluster: Any, collector: Collector, trace: Trace) -> None:
    tracing, queue = trace(to(collector))
    door = await cluster.door([await cluster.engine()], tracing=tracing)
    door.services.metrics.registry.register(queue)

    def failed() -> float:
        return door.sample("conductor_spans_dropped_total", reason="export failed")

    collector.status = 400
    with structlog.testing.capture_logs() as lines:
        for spans in (4, 8, 12):
            assert (await door.chat()).status_code == 200
            await cluster.wait_until(lambda spans=spans: failed() == spans)
        collector.status = 200
        await door.chat()
        await cluster.wait_until(lambda: door.sample("conductor_spans_exported_total") == 4)
    told = [line for line in lines if "spans" in line["event"]]
    assert [line["log_level"] for line in told] == ["warning", "info"]
    assert "400" in told[0]["reason"]
    assert failed() == 12


class Stuck(SpanExporter):
    """Takes nothing until it is told to."""

    def __init__(self) -> None:
        self.free = threading.Event()
        self.taken = 0

    def export(self, spans: Any) -> SpanExportResult:
        self.free.wait(20)
        self.taken += len(spans)
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        self.free.set()


async def test_a_full_queue_drops_spans_and_delays_nobody(cluster: Any, trace: Trace) -> None:
    exporter = Stuck()
    tracing, queue = trace(exporter, max_spans=10, batch_spans=4)
    door = await cluster.door([await cluster.engine()], tracing=tracing)
    for _ in range(10):
        assert (await door.chat()).status_code == 200
    # Four of the forty may have been on their way when the exporter got stuck.
    assert 26 <= queue.dropped_full <= 30
    exporter.free.set()
    await cluster.wait_until(lambda: queue.exported + queue.dropped_full == 40)
    assert exporter.taken == queue.exported


def test_what_is_left_is_sent_at_the_end() -> None:
    class Keeps(SpanExporter):
        def __init__(self) -> None:
            self.spans: list[ReadableSpan] = []

        def export(self, spans: Any) -> SpanExportResult:
            self.spans += spans
            return SpanExportResult.SUCCESS

    exporter = Keeps()
    queue = SpanQueue(exporter, interval_s=60)
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(queue)
    for number in range(3):
        provider.get_tracer("t").start_span(str(number)).end()
    queue.shutdown()
    assert [span.name for span in exporter.spans] == ["0", "1", "2"]
