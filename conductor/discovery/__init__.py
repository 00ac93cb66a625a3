"""Finding engines, and asking each what it serves and where it publishes.

What asks one engine is here; the sources that list engines are imported from their modules.
"""

from conductor.discovery.engine_client import EngineClient, ProbeError, UnreachableError
from conductor.discovery.probing import (
    EngineMetrics,
    EventEndpoints,
    ServerInfo,
    fetch_event_endpoints,
    fetch_metrics,
    fetch_models,
    fetch_polled_events,
    fetch_server_info,
    key_headers,
    load_endpoints,
    probe,
    reported_load,
    stream_configs,
)

__all__ = [
    "EngineClient",
    "EngineMetrics",
    "EventEndpoints",
    "ProbeError",
    "ServerInfo",
    "UnreachableError",
    "fetch_event_endpoints",
    "fetch_metrics",
    "fetch_models",
    "fetch_polled_events",
    "fetch_server_info",
    "key_headers",
    "load_endpoints",
    "probe",
    "reported_load",
    "stream_configs",
]
