"""Probing engines over real HTTP, and watching them come, go and come back."""

import asyncio
import time
from collections.abc import AsyncIterator

import pytest
from aiohttp import web
from structlog.testing import capture_logs

from cache_index import (
    CacheIndex,
    EventSources,
    Holder,
    StreamConfig,
    TrtllmEventSource,
    VllmEventSource,
)
from cache_index.sglang_load import LoadStat
from conductor.catalogue import LLAMA_8B_H100
from conductor.circuit import SuspensionPolicy
from conductor.cluster import Cluster, Health, make_instance
from conductor.discovery import (
    EngineClient,
    ProbeError,
    fetch_event_endpoints,
    fetch_metrics,
    fetch_models,
    fetch_server_info,
    load_endpoints,
    probe,
    reported_load,
    stream_configs,
)
from conductor.monitor import ClusterMonitor
from conductor.placement import Objectives, Role
from conductor.policies import make_policy
from conductor.scheduler import Scheduler

METRICS = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="tiny"} 3.0
vllm:num_requests_running{engine="1",model_name="tiny"} 1.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="tiny"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 2.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="tiny"} 0.25
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="32",engine="0",num_gpu_blocks="640",prefix_caching_hash_algo="sha256"} 1.0
"""
SOURCES = {
    "0": {
        "endpoint": "tcp://*:5601",
        "replay_endpoint": "tcp://*:5611",
        "buffer_steps": 10000,
        "topic": "kv",
    },
    "1": {"endpoint": "tcp://10.1.1.1:5602", "replay_endpoint": None},
}
SERVER_INFO = {
    "max_total_num_tokens": 3200,
    "kv_events": {
        "publisher": "zmq",
        "endpoint_host": "*",
        "endpoint_port_base": 6001,
        "topic": "kv-events",
        "block_size": 16,
        "dp_size": 2,
        "load_endpoint_port_base": 6011,
        "load_topic": "load",
        "replay_endpoint_port_base": 6021,
    },
}
SGLANG_METRICS = """\
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{model_name="tiny",dp_rank="1"} 4.0
# TYPE sglang:num_queue_reqs gauge
sglang:num_queue_reqs{model_name="tiny",dp_rank="1"} 7.0
# TYPE sglang:token_usage gauge
sglang:token_usage{model_name="tiny",dp_rank="1"} 0.5
# TYPE sglang:num_running_reqs_offline_batch gauge
sglang:num_running_reqs_offline_batch{model_name="tiny"} 9.0
"""
MODELS = {"data": [{"id": "tiny", "max_model_len": 4096}, {"id": "lora1", "parent": "tiny"}]}


class FakeEngine:
    """An HTTP server that answers probes; what it answers can be changed, and it can be stopped and started."""

    def __init__(self) -> None:
        self.health = 200
        self.answers: dict[str, object] = {
            "/v1/models": MODELS,
            "/kv_event_sources": SOURCES,
            "/metrics": METRICS,
        }
        self.polled_events: list[dict[str, object]] | None = None  # a list makes it a TensorRT-LLM server
        self.key: str | None = None  # without which nothing but /health is answered
        self.health_checks: list[str | None] = []  # with which key, in order
        self.encodings: set[str | None] = set()
        self.port = 0
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        app = web.Application()
        app.router.add_get("/health", self._health)
        if self.polled_events is not None:
            app.router.add_post("/kv_cache_events", self._drain)
        app.router.add_get("/{path:.*}", self._get)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _drain(self, request: web.Request) -> web.Response:
        taken, self.polled_events = self.polled_events, []
        return web.json_response(taken)

    async def _health(self, request: web.Request) -> web.Response:
        self.health_checks.append(request.headers.get("authorization"))
        return web.Response(status=self.health)

    async def _get(self, request: web.Request) -> web.Response:
        if self.key is not None and request.headers.get("authorization") != f"Bearer {self.key}":
            return web.Response(status=401)
        self.encodings.add(request.headers.get("accept-encoding"))
        answer = self.answers.get(request.path)
        if answer is None:
            return web.Response(status=404)
        return web.Response(text=answer) if isinstance(answer, str) else web.json_response(answer)


@pytest.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    engine = FakeEngine()
    await engine.start()
    yield engine
    await engine.stop()


@pytest.fixture
async def client() -> AsyncIterator[EngineClient]:
    client = EngineClient(5.0)
    yield client
    await client.close()


def _instance(url: str, ranks: int = 1, api_key: str | None = None, instance_id: str = "a"):
    return make_instance(
        api_key=api_key,
        instance_id=instance_id,
        url=url,
        role=Role.MIXED,
        instance_class=LLAMA_8B_H100,
        protocol="vllm-nixl",
        ranks=ranks,
    )


async def test_an_engine_with_a_key_is_asked_with_it(engine: FakeEngine, client: EngineClient) -> None:
    engine.key = "s3cret"
    with pytest.raises(ProbeError, match="GET /v1/models answered 401"):
        await probe(client, _instance(engine.url), now_s=5.0)
    facts, endpoints, metrics = await probe(client, _instance(engine.url, api_key="s3cret"), now_s=5.0)
    assert (facts.base_model, facts.block_size, facts.publishes_events) == ("tiny", 32, True)
    assert metrics.loads[0].running == 3
    del engine.answers["/kv_event_sources"], engine.answers["/metrics"]
    engine.answers["/server_info"] = SERVER_INFO
    facts, endpoints, metrics = await probe(client, _instance(engine.url, api_key="s3cret"), now_s=5.0)
    assert (facts.block_size, set(endpoints)) == (16, {0, 1})


async def test_an_engine_tells_everything_without_configuration(
    engine: FakeEngine, client: EngineClient
) -> None:
    instance = _instance(engine.url, ranks=2)
    facts, endpoints, metrics = await probe(client, instance, now_s=5.0)
    assert engine.encodings == {None}
    assert [m.name for m in facts.models] == ["tiny", "lora1"]
    assert facts.base_model == "tiny"
    assert (facts.block_size, facts.kv_capacity_blocks, facts.publishes_events) == (32, 640, True)
    assert (metrics.loads[0].running, metrics.loads[0].waiting, metrics.loads[0].kv_usage) == (3, 2, 0.25)
    assert metrics.loads[1].running == 1
    streams = stream_configs(instance, facts, endpoints)
    assert [s.holder for s in streams] == [Holder("a", 0), Holder("a", 1)]
    assert streams[0].endpoint == "tcp://127.0.0.1:5601"
    assert streams[0].replay_endpoint == "tcp://127.0.0.1:5611"
    assert (streams[0].topic, streams[0].model) == ("kv", "tiny")
    assert (streams[1].endpoint, streams[1].replay_endpoint) == ("tcp://10.1.1.1:5602", None)


async def test_an_engine_without_events_or_metrics_is_usable(
    engine: FakeEngine, client: EngineClient
) -> None:
    engine.answers = {"/v1/models": MODELS}
    facts, endpoints, metrics = await probe(client, _instance(engine.url), now_s=0.0)
    assert (facts.block_size, facts.publishes_events, endpoints, metrics.loads) == (None, False, {}, {})


@pytest.mark.parametrize("models", [{}, {"data": []}, {"data": [{"name": "x"}]}, [], "text"])
async def test_a_strange_model_list_is_a_precise_error(
    engine: FakeEngine, client: EngineClient, models: object
) -> None:
    engine.answers["/v1/models"] = models
    with pytest.raises(ProbeError, match="/v1/models"):
        await fetch_models(client, engine.url)


@pytest.mark.parametrize("sources", [{"x": {}}, {"0": {"endpoint": 5}}, [1], {"0": "tcp://"}])
async def test_strange_event_sources_are_a_precise_error(
    engine: FakeEngine, client: EngineClient, sources: object
) -> None:
    engine.answers["/kv_event_sources"] = sources
    with pytest.raises(ProbeError, match="/kv_event_sources"):
        await fetch_event_endpoints(client, engine.url)


async def test_broken_metrics_are_a_precise_error(engine: FakeEngine, client: EngineClient) -> None:
    engine.answers["/metrics"] = 'vllm:num_requests_running{engine="0"} many\n'
    with pytest.raises(ProbeError, match="/metrics"):
        await fetch_metrics(client, engine.url, 0.0)


async def test_sglang_tells_its_ports_by_rank(engine: FakeEngine, client: EngineClient) -> None:
    engine.answers = {"/v1/models": MODELS, "/server_info": SERVER_INFO, "/metrics": SGLANG_METRICS}
    instance = _instance(engine.url, ranks=2)
    facts, endpoints, metrics = await probe(client, instance, now_s=5.0)
    assert (facts.block_size, facts.kv_capacity_blocks, facts.publishes_events) == (16, 200, True)
    streams = stream_configs(instance, facts, endpoints)
    assert [(s.endpoint, s.replay_endpoint, s.topic) for s in streams] == [
        ("tcp://127.0.0.1:6001", "tcp://127.0.0.1:6021", "kv-events"),
        ("tcp://127.0.0.1:6002", "tcp://127.0.0.1:6022", "kv-events"),
    ]
    feeds = load_endpoints(instance, endpoints)
    assert feeds[Holder("a", 1)].load_endpoint == "tcp://127.0.0.1:6012"
    assert feeds[Holder("a", 1)].load_topic == "load"
    load = metrics.loads[1]
    assert (load.running, load.waiting, load.kv_usage) == (4, 7, 0.5)


async def test_sglang_events_are_namespaced_in_one_format_only(
    engine: FakeEngine, client: EngineClient
) -> None:
    engine.answers["/server_info"] = SERVER_INFO
    assert not (await fetch_server_info(client, engine.url)).endpoints[0].namespaced
    engine.answers["/server_info"] = {"kv_events": {**SERVER_INFO["kv_events"], "format": "dynamo"}}
    assert (await fetch_server_info(client, engine.url)).endpoints[0].namespaced


@pytest.mark.parametrize("info", [{}, {"kv_events": None}, {"kv_events": {"publisher": "null"}}, [1]])
async def test_a_server_without_events_says_nothing(
    engine: FakeEngine, client: EngineClient, info: object
) -> None:
    engine.answers["/server_info"] = info
    assert (await fetch_server_info(client, engine.url)).endpoints == {}


async def test_replay_and_load_feed_are_optional(engine: FakeEngine, client: EngineClient) -> None:
    events = {"publisher": "zmq", "endpoint_port_base": 6001, "block_size": 16}
    engine.answers["/server_info"] = {"kv_events": events}
    found = (await fetch_server_info(client, engine.url)).endpoints
    assert (found[0].replay_endpoint, found[0].load_endpoint) == (None, None)
    assert load_endpoints(_instance(engine.url), found) == {}


TRTLLM_ITERATION = {
    "iter": 154,
    "kvCacheStats": {"maxNumBlocks": 200, "usedNumBlocks": 50, "tokensPerBlock": 64},
    "numActiveRequests": 3,
    "numQueuedRequests": 2,
}


@pytest.fixture
async def trtllm() -> AsyncIterator[FakeEngine]:
    engine = FakeEngine()
    engine.answers = {"/v1/models": MODELS, "/metrics": [TRTLLM_ITERATION], "/server_info": {}}
    tokens = [{"token_id": token} for token in range(64)]
    stored = {"type": "stored", "parent_hash": None, "blocks": [{"block_hash": 7, "tokens": tokens}]}
    engine.polled_events = [
        {"event_id": 0, "data": {"type": "created", "num_blocks_per_cache_level": [200, 0]}},
        {"event_id": 1, "data": stored},
    ]
    await engine.start()
    yield engine
    await engine.stop()


async def test_tensorrt_llm_is_known_by_its_route_and_loses_no_event(
    trtllm: FakeEngine, client: EngineClient
) -> None:
    instance = _instance(trtllm.url, ranks=2)
    facts, endpoints, metrics = await probe(client, instance, now_s=5.0)
    assert (facts.block_size, facts.kv_capacity_blocks, facts.publishes_events) == (64, 200, True)
    load = metrics.loads[0]
    assert (load.running, load.waiting, load.kv_usage) == (3, 2, 0.25)
    streams = stream_configs(instance, facts, endpoints)
    assert [(s.holder, s.endpoint, s.block_size) for s in streams] == [
        (Holder("a", rank), trtllm.url, 64) for rank in (0, 1)
    ]
    assert trtllm.polled_events is not None and len(trtllm.polled_events) == 2
    trtllm.answers["/metrics"] = []  # idle since its start
    facts, *_ = await probe(client, instance, now_s=5.0)
    assert (facts.block_size, facts.kv_capacity_blocks) == (32, None)


async def test_tensorrt_llm_is_polled_without_configuration(trtllm: FakeEngine) -> None:
    cluster = Cluster()
    cluster.add(_instance(trtllm.url))
    index = CacheIndex()
    scheduler = Scheduler(cluster, index, make_policy("slo"), Objectives(), SuspensionPolicy())
    events = EventSources({"tcp": VllmEventSource(index), "http": TrtllmEventSource(index, interval_s=0.01)})
    events.start()
    monitor = ClusterMonitor(
        scheduler, events, time.monotonic, interval_s=0.02, timeout_s=5.0, unhealthy_after=2
    )
    monitor.start()
    try:
        await _until(lambda: len(index.residencies(Holder("a"))) == 1)
        assert events.stream_stats()[0].state == "warm"
        scheduler.instance_down("a", "test")  # it failed a request, but its process lives
        await _until(lambda: len(index.residencies(Holder("a"))) == 1)
    finally:
        await monitor.close()
        await asyncio.to_thread(events.close)


@pytest.mark.parametrize("metrics", [{"iter": 1}, ["text"], [{"kvCacheStats": [1]}]])
async def test_strange_iteration_statistics_are_a_precise_error(
    engine: FakeEngine, client: EngineClient, metrics: object
) -> None:
    engine.answers["/metrics"] = metrics
    with pytest.raises(ProbeError, match="/metrics"):
        await fetch_metrics(client, engine.url, 0.0)


async def test_metrics_that_do_not_come_say_nothing() -> None:
    """An idle TensorRT-LLM server waits seconds for an iteration; that must not look like a dead engine."""

    async def wait(request: web.Request) -> web.Response:
        await asyncio.sleep(0.5)
        return web.json_response([])

    app = web.Application()
    app.router.add_get("/metrics", wait)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    client = EngineClient(0.05)
    try:
        found = await fetch_metrics(client, f"http://127.0.0.1:{runner.addresses[0][1]}", 0.0)
    finally:
        await client.close()
        await runner.cleanup()
    assert (found.loads, found.block_size) == ({}, None)


async def test_models_tell_where_they_were_loaded_from(engine: FakeEngine, client: EngineClient) -> None:
    engine.answers["/v1/models"] = {"data": [{"id": "tiny", "root": "/models/tiny"}, {"id": "x"}]}
    assert [model.root for model in await fetch_models(client, engine.url)] == ["/models/tiny", None]


@pytest.mark.parametrize(
    "events",
    [
        {"publisher": "zmq"},
        {"publisher": "zmq", "endpoint_port_base": "x", "block_size": 16},
        {"publisher": "zmq", "endpoint_port_base": 1, "block_size": None},
        7,
    ],
)
async def test_a_strange_server_info_is_a_precise_error(
    engine: FakeEngine, client: EngineClient, events: object
) -> None:
    engine.answers["/server_info"] = {"kv_events": events}
    with pytest.raises(ProbeError, match="/server_info"):
        await fetch_server_info(client, engine.url)


def test_a_pushed_load_reads_like_the_gauges() -> None:
    load = reported_load(LoadStat(3, 2, 800, 3200, 1, 96, 900, 16, 5, 6), now_s=7.0)
    assert (load.running, load.waiting, load.kv_usage, load.at_s) == (3, 2, 0.25, 7.0)


class RecordingEvents:
    """An event source that only remembers what it was told."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Holder]] = []

    def start(self) -> None: ...

    def close(self) -> None: ...

    def add_stream(self, config: StreamConfig) -> None:
        self.calls.append(("add", config.holder))

    def remove_stream(self, holder: Holder) -> None:
        self.calls.append(("remove", holder))

    def resync(self, holder: Holder) -> None:
        self.calls.append(("resync", holder))

    def stream_stats(self) -> list[object]:
        return []


async def _until(condition) -> None:
    deadline_s = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline_s, "the condition never held"
        await asyncio.sleep(0.005)


@pytest.fixture
async def watched(engine: FakeEngine) -> AsyncIterator[tuple[Scheduler, RecordingEvents]]:
    cluster = Cluster()
    cluster.add(_instance(engine.url))
    scheduler = Scheduler(cluster, CacheIndex(), make_policy("slo"), Objectives(), SuspensionPolicy())
    events = RecordingEvents()
    monitor = ClusterMonitor(
        scheduler, events, time.monotonic, interval_s=0.02, timeout_s=1.0, unhealthy_after=2
    )
    monitor.start()
    yield scheduler, events
    await monitor.close()


async def test_an_engine_comes_up_goes_and_comes_back_with_its_stream_read_anew(
    engine: FakeEngine, watched: tuple[Scheduler, RecordingEvents]
) -> None:
    scheduler, events = watched
    instance = scheduler.cluster["a"]
    await _until(lambda: instance.health is Health.UP)
    assert events.calls == [("add", Holder("a", 0))]
    assert instance.ranks[0].reported is not None
    await engine.stop()
    await _until(lambda: instance.health is Health.DOWN)
    assert "cannot connect" in instance.health_reason
    await engine.start()
    await _until(lambda: instance.health is Health.UP)
    resync = ("resync", Holder("a", 0))  # on the way down and on the way up
    assert events.calls == [("add", Holder("a", 0)), resync, resync]


async def test_an_engine_that_does_not_come_up_is_told_of_once(engine: FakeEngine) -> None:
    await engine.stop()
    cluster = Cluster()
    cluster.add(_instance(engine.url))
    scheduler = Scheduler(cluster, CacheIndex(), make_policy("slo"), Objectives(), SuspensionPolicy())
    monitor = ClusterMonitor(
        scheduler, RecordingEvents(), time.monotonic, interval_s=0.01, timeout_s=1.0, unhealthy_after=2
    )
    with capture_logs() as logs:
        monitor.start()
        await _until(lambda: bool(logs))
        await asyncio.sleep(0.1)
        await engine.start()
        await _until(lambda: cluster["a"].health is Health.UP)
    await monitor.close()
    assert [(line["event"], line["instance"]) for line in logs] == [
        ("instance has not come up", "a"),
        ("instance is up", "a"),
    ]
    assert "cannot connect" in logs[0]["reason"]


async def test_a_load_feed_is_followed(engine: FakeEngine) -> None:
    engine.answers = {"/v1/models": MODELS, "/server_info": SERVER_INFO}
    cluster = Cluster()
    cluster.add(_instance(engine.url))
    scheduler = Scheduler(cluster, CacheIndex(), make_policy("slo"), Objectives(), SuspensionPolicy())
    followed: list[tuple[Holder, str, str]] = []
    monitor = ClusterMonitor(
        scheduler,
        RecordingEvents(),
        time.monotonic,
        interval_s=0.02,
        timeout_s=1.0,
        unhealthy_after=2,
        follow_load=lambda *found: followed.append(found),
    )
    monitor.start()
    await _until(lambda: bool(followed))
    await monitor.close()
    assert followed == [(Holder("a", 0), "tcp://127.0.0.1:6011", "load")]


async def test_a_moved_event_endpoint_is_followed(
    engine: FakeEngine, watched: tuple[Scheduler, RecordingEvents]
) -> None:
    scheduler, events = watched
    instance = scheduler.cluster["a"]
    await _until(lambda: instance.health is Health.UP)
    engine.answers["/kv_event_sources"] = {"0": {"endpoint": "tcp://*:7001"}}
    scheduler.instance_down("a", "test")
    await _until(lambda: instance.health is Health.UP)
    assert [call for call, _ in events.calls] == ["add", "remove", "add"]


async def test_errors_count_before_an_instance_is_down(
    engine: FakeEngine, watched: tuple[Scheduler, RecordingEvents]
) -> None:
    scheduler, _ = watched
    instance = scheduler.cluster["a"]
    await _until(lambda: instance.health is Health.UP)
    engine.health = 503
    await _until(lambda: instance.health is Health.DOWN)
    assert instance.health_reason == "GET /health answered 503"


async def test_instances_are_checked_one_after_another_through_the_interval(engine: FakeEngine) -> None:
    cluster = Cluster()
    for name in "abcde":
        cluster.add(_instance(engine.url, api_key=name, instance_id=name))
    scheduler = Scheduler(cluster, CacheIndex(), make_policy("slo"), Objectives(), SuspensionPolicy())
    monitor = ClusterMonitor(
        scheduler, RecordingEvents(), time.monotonic, interval_s=0.6, timeout_s=1.0, unhealthy_after=2
    )
    monitor.start()
    await _until(lambda: len(engine.health_checks) == 15)
    await monitor.close()
    # Multiples of the golden ratio, without the whole: 0.62, 0.24, 0.85, 0.47 and 0.09 of an interval.
    in_turn = [f"Bearer {name}" for name in "ebdac"]
    assert engine.health_checks[5:] == in_turn * 2
