"""Tracing as the configuration, or OpenTelemetry's environment variables, ask for it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import AsyncExitStack

import structlog
from prometheus_client import CollectorRegistry

from conductor.configuration_faults import ConfigError
from conductor.front_door_config import TracingConfig
from router.request_trace import Tracing

_log = structlog.get_logger(__name__)
_TRACES = "/v1/traces"


def start_tracing(
    config: TracingConfig, environment: Mapping[str, str], registry: CollectorRegistry, stack: AsyncExitStack
) -> Tracing | None:
    """None, and nothing imported, where no collector is named. What is left is sent when ``stack`` closes.

    Raises ConfigError where the configuration asks for what is not installed; what only the environment asks
    for may have been meant for another program, and is a warning.
    """
    endpoint = config.otlp_endpoint
    if environment.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    if endpoint is None:
        if not _named_by(environment):
            return None
        protocol = environment.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or environment.get(
            "OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf"
        )
        if protocol != "http/protobuf":
            _log.warning(
                "tracing is off: only OTEL_EXPORTER_OTLP_PROTOCOL=http/protobuf is known", given=protocol
            )
            return None
    elif not endpoint.endswith(_TRACES):
        endpoint += _TRACES
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

        from router.request_spans import SpanTracing
        from router.span_export import SpanQueue
    except ImportError as error:
        message = f"tracing needs OpenTelemetry's SDK ({error}): pip install 'kv-conductor[tracing]'"
        if endpoint is not None:
            raise ConfigError(f"tracing.otlp_endpoint: {message}") from None
        _log.warning(message)
        return None
    name = config.service_name or environment.get("OTEL_SERVICE_NAME") or "conductor"
    provider = TracerProvider(
        sampler=ParentBased(TraceIdRatioBased(config.sample_ratio)),
        resource=Resource.create({"service.name": name}),
        shutdown_on_exit=False,
    )
    queue = SpanQueue(OTLPSpanExporter(endpoint=endpoint))
    provider.add_span_processor(queue)
    registry.register(queue)
    stack.push_async_callback(asyncio.to_thread, queue.shutdown)
    return SpanTracing(provider)


def _named_by(environment: Mapping[str, str]) -> bool:
    return environment.get("OTEL_TRACES_EXPORTER", "otlp") == "otlp" and bool(
        environment.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
        or environment.get("OTEL_EXPORTER_OTLP_ENDPOINT")
    )
