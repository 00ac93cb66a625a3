"""Asking an engine what it serves, how it caches and where it publishes KV events. No configuration needed.

Formats as recorded from vLLM 0.32 (`/v1/models`, `/kv_event_sources`, the `cache_config_info` and load gauges
of `/metrics`) and SGLang 0.5.23 (`kv_events` of `/server_info`); SGLang's gauges are named in its documentation.
TensorRT-LLM 1.x is known by its route `/kv_cache_events`; its `/metrics` are the iteration statistics of its own
documentation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import orjson
from prometheus_client.parser import text_string_to_metric_families

from cache_index import Holder, StreamConfig
from cache_index.sglang_load import LoadStat
from cache_index.trtllm import DEFAULT_BLOCK_SIZE, PATH
from conductor.cluster import EngineFacts, InstanceState, ServedModel
from conductor.discovery.engine_client import Answer, EngineClient, Headers, NoAnswerError, ProbeError
from conductor.rank import ReportedLoad

_RUNNING = "vllm:num_requests_running"
_WAITING = "vllm:num_requests_waiting"
_KV_USAGE = "vllm:kv_cache_usage_perc"
_PREEMPTIONS = "vllm:num_preemptions_total"
_CACHE_CONFIG = "vllm:cache_config_info"
_FIELD_OF_GAUGE = {
    _RUNNING: "running",
    _WAITING: "waiting",
    _KV_USAGE: "kv_usage",
    _PREEMPTIONS: "preemptions",
    "sglang:num_running_reqs": "running",
    "sglang:num_queue_reqs": "waiting",
    "sglang:token_usage": "kv_usage",
}
_WANTED_GAUGES = tuple(f"\n{gauge}{{".encode() for gauge in (*_FIELD_OF_GAUGE, _CACHE_CONFIG))


@dataclass(frozen=True, slots=True)
class EventEndpoints:
    """Where one rank publishes its KV events, and its load where it does.

    ``namespaced`` is False for engines whose events do not tell requests with different extra keys apart:
    they may seem to have cached a prompt that they have under another key only.
    """

    endpoint: str
    replay_endpoint: str | None
    topic: str
    load_endpoint: str | None = None
    load_topic: str = ""
    namespaced: bool = True


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """What SGLang's /server_info says of caching; endpoints by rank."""

    endpoints: dict[int, EventEndpoints]
    block_size: int | None
    kv_capacity_blocks: int | None


@dataclass(frozen=True, slots=True)
class EngineMetrics:
    """The part of an engine's /metrics that scheduling uses; loads by rank."""

    loads: dict[int, ReportedLoad]
    block_size: int | None
    kv_capacity_blocks: int | None


def key_headers(instance: InstanceState) -> dict[str, str]:
    """The engine's own key, where it has one: without it vLLM and SGLang do not even list their models."""
    key = instance.ranks[0].target.api_key
    return {} if key is None else {"authorization": f"Bearer {key}"}


async def fetch_models(
    client: EngineClient, url: str, headers: Headers | None = None
) -> tuple[ServedModel, ...]:
    """Models and LoRA adapters of an engine. Raises ProbeError."""
    response = await client.ask(url, "/v1/models", headers)
    if response.status != 200:
        raise ProbeError(f"GET /v1/models answered {response.status}")
    try:
        models = tuple(
            ServedModel(
                name=str(m["id"]),
                parent=m.get("parent"),
                max_model_len=m.get("max_model_len"),
                root=m.get("root"),
            )
            for m in orjson.loads(response.body)["data"]
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ProbeError(f"GET /v1/models is not an OpenAI model list: {error!r}") from None
    if not models:
        raise ProbeError("GET /v1/models lists no model")
    return models


async def fetch_event_endpoints(
    client: EngineClient, url: str, headers: Headers | None = None
) -> dict[int, EventEndpoints]:
    """KV event endpoints by rank; empty when the engine does not publish. A host of `*` is the engine's own."""
    response = await client.ask(url, "/kv_event_sources", headers)
    if response.status != 200:
        return {}
    host = urlsplit(url).hostname or "127.0.0.1"
    try:
        return {
            int(rank): EventEndpoints(
                endpoint=_reachable(source["endpoint"], host),
                replay_endpoint=_reachable(source["replay_endpoint"], host)
                if source.get("replay_endpoint")
                else None,
                topic=source.get("topic") or "",
            )
            for rank, source in orjson.loads(response.body).items()
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ProbeError(f"GET /kv_event_sources has an unknown shape: {error!r}") from None


async def fetch_server_info(client: EngineClient, url: str, headers: Headers | None = None) -> ServerInfo:
    """SGLang's KV event and load endpoints; nothing when the engine is another or does not publish.

    Every data-parallel rank publishes on ports of its own, one apart.
    """
    nothing = ServerInfo({}, None, None)
    response = await client.ask(url, "/server_info", headers)
    if response.status != 200:
        return nothing
    host = urlsplit(url).hostname or "127.0.0.1"
    try:
        info = orjson.loads(response.body)
        events = info.get("kv_events") if isinstance(info, dict) else None
        if not events or events.get("publisher") != "zmq":
            return nothing
        block_size = int(events["block_size"])
        capacity_tokens = _integer(info.get("max_total_num_tokens"))
        return ServerInfo(
            endpoints={
                rank: EventEndpoints(
                    endpoint=_rank_endpoint(events, "endpoint_port_base", rank, host) or "",
                    replay_endpoint=_rank_endpoint(events, "replay_endpoint_port_base", rank, host),
                    topic=events.get("topic") or "",
                    load_endpoint=_rank_endpoint(events, "load_endpoint_port_base", rank, host),
                    load_topic=events.get("load_topic") or "load",
                    namespaced=events.get("format") == "dynamo",
                )
                for rank in range(int(events.get("dp_size") or 1))
                if events["endpoint_port_base"]
            },
            block_size=block_size,
            kv_capacity_blocks=None if capacity_tokens is None else capacity_tokens // block_size,
        )
    except (ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError) as error:
        raise ProbeError(f"GET /server_info has an unknown shape: {error!r}") from None


async def fetch_polled_events(client: EngineClient, url: str, ranks: int) -> dict[int, EventEndpoints]:
    """TensorRT-LLM's events, by rank, all from one route; empty when the engine is another.

    Asks for the route's methods only: whoever asks for events takes them away. The server answers the events
    of every rank at once, so there must be one poller; it answers none unless its KV cache configuration has an
    `event_buffer_max_size`.
    """
    response = await client.ask(url, PATH, method="OPTIONS")
    allowed = {method.strip() for method in response.headers.get("allow", "").upper().split(",")}
    if response.status not in (200, 204, 405) or "POST" not in allowed:
        return {}
    return {rank: EventEndpoints(endpoint=url, replay_endpoint=None, topic="") for rank in range(ranks)}


async def fetch_metrics(
    client: EngineClient, url: str, now_s: float, headers: Headers | None = None
) -> EngineMetrics:
    """Load gauges and cache configuration; all unknown when the engine serves no /metrics.

    An engine that does not answer in time counts as one that says nothing: TensorRT-LLM waits seconds for an
    iteration when it is idle, and whether an engine lives is asked elsewhere.
    """
    nothing = EngineMetrics({}, None, None)
    try:
        response = await client.ask(url, "/metrics", headers)
    except NoAnswerError:
        return nothing
    if response.status != 200:
        return nothing
    if response.headers.get("content-type", "").startswith("application/json"):
        return _iteration_statistics(response, now_s)
    return _gauges(response.body, now_s)


def _gauges(page: bytes, now_s: float) -> EngineMetrics:
    gauges: dict[int, dict[str, float]] = {}
    block_size = capacity = None
    try:
        for family in text_string_to_metric_families(_scheduling_lines(page)):
            for sample in family.samples:
                if sample.name == _CACHE_CONFIG:
                    block_size = _integer(sample.labels.get("block_size"))
                    capacity = _integer(sample.labels.get("num_gpu_blocks"))
                elif math.isfinite(sample.value):
                    rank = _integer(sample.labels.get("engine") or sample.labels.get("dp_rank")) or 0
                    gauges.setdefault(rank, {})[_FIELD_OF_GAUGE[sample.name]] = sample.value
    except ValueError as error:
        raise ProbeError(f"GET /metrics is not in Prometheus' text format: {error}") from None
    loads = {
        rank: ReportedLoad(
            running=int(values.get("running", 0)),
            waiting=int(values.get("waiting", 0)),
            kv_usage=values.get("kv_usage", 0.0),
            at_s=now_s,
            preemptions=_integer(values.get("preemptions")),
        )
        for rank, values in gauges.items()
    }
    return EngineMetrics(loads, block_size, capacity)


def _iteration_statistics(response: Answer, now_s: float) -> EngineMetrics:
    """TensorRT-LLM: one object an iteration since the last question, none when it is idle."""
    try:
        iterations = orjson.loads(response.body)
        if not iterations:
            return EngineMetrics({}, None, None)
        latest = iterations[-1]
        cache = latest.get("kvCacheStats") or {}
        blocks = _integer(cache.get("maxNumBlocks"))
        load = ReportedLoad(
            running=int(latest.get("numActiveRequests") or 0),
            waiting=int(latest.get("numQueuedRequests") or 0),
            kv_usage=int(cache.get("usedNumBlocks") or 0) / blocks if blocks else 0.0,
            at_s=now_s,
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ProbeError(f"GET /metrics has an unknown shape: {error!r}") from None
    return EngineMetrics({0: load}, _integer(cache.get("tokensPerBlock")), blocks)


async def probe(
    client: EngineClient, instance: InstanceState, now_s: float
) -> tuple[EngineFacts, dict[int, EventEndpoints], EngineMetrics]:
    """Everything an engine says of itself. Raises ProbeError."""
    headers = key_headers(instance)
    models = await fetch_models(client, instance.url, headers)
    endpoints = await fetch_event_endpoints(client, instance.url, headers)
    metrics = await fetch_metrics(client, instance.url, now_s, headers)
    block_size, capacity_blocks = metrics.block_size, metrics.kv_capacity_blocks
    if not endpoints and block_size is None:
        info = await fetch_server_info(client, instance.url, headers)
        endpoints, block_size, capacity_blocks = info.endpoints, info.block_size, info.kv_capacity_blocks
    if not endpoints:
        endpoints = await fetch_polled_events(client, instance.url, len(instance.ranks))
        if endpoints:  # until its first iteration the server does not tell the size
            block_size, capacity_blocks = metrics.block_size or DEFAULT_BLOCK_SIZE, metrics.kv_capacity_blocks
    facts = EngineFacts(
        models=models,
        block_size=block_size,
        kv_capacity_blocks=capacity_blocks,
        publishes_events=bool(endpoints),
    )
    return facts, endpoints, metrics


def stream_configs(
    instance: InstanceState, facts: EngineFacts, endpoints: dict[int, EventEndpoints]
) -> list[StreamConfig]:
    """One event stream a rank, as far as the engine publishes. Events tell their block size, polled ones do not."""
    return [
        StreamConfig(
            holder=rank.holder,
            model=facts.base_model,
            endpoint=found.endpoint,
            replay_endpoint=found.replay_endpoint,
            topic=found.topic,
            block_size=instance.block_size_override
            or (facts.block_size if found.endpoint.startswith("http") else None),
        )
        for rank in instance.ranks
        if (found := endpoints.get(rank.target.rank)) is not None
    ]


def load_endpoints(
    instance: InstanceState, endpoints: dict[int, EventEndpoints]
) -> dict[Holder, EventEndpoints]:
    """The ranks that publish their load."""
    return {
        rank.holder: found
        for rank in instance.ranks
        if (found := endpoints.get(rank.target.rank)) is not None and found.load_endpoint is not None
    }


def reported_load(stat: LoadStat, now_s: float) -> ReportedLoad:
    """SGLang's pushed load in the terms of the gauges."""
    return ReportedLoad(running=stat.running, waiting=stat.waiting, kv_usage=stat.kv_usage, at_s=now_s)


def _scheduling_lines(page: bytes) -> str:
    """Only the samples read here: parsing an engine's whole page costs a hundred times more."""
    page = b"\n" + page
    lines = []
    for wanted in _WANTED_GAUGES:
        at = page.find(wanted)
        while at >= 0:
            end = page.find(b"\n", at + 1)
            lines.append(page[at:] if end < 0 else page[at:end])
            at = page.find(wanted, at + 1)
    return b"".join(lines).decode(errors="replace") + "\n"


def _rank_endpoint(events: dict[str, Any], port_base: str, rank: int, host: str) -> str | None:
    base = events.get(port_base)
    if not base:
        return None
    return _reachable(f"tcp://{events.get('endpoint_host') or '*'}:{int(base) + rank}", host)


def _reachable(endpoint: str, host: str) -> str:
    return endpoint.replace("://*:", f"://{host}:").replace("://0.0.0.0:", f"://{host}:")


def _integer(value: Any) -> int | None:
    try:
        return int(value)
    except (TypeError, ValueError):
        return None
