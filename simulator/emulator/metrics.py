"""``/metrics`` with vLLM's names, read from the engines when scraped."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from simulator.block_hash import ALGORITHM
from simulator.emulator.driver import Observer
from simulator.engine import Engine

_TTFT_BUCKETS_S: Final = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0),
)
_ITL_BUCKETS_S: Final = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5),
    *(0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0),
)
_LABELS: Final = ("engine", "model_name")


class EngineMetrics:
    """The registry of one process; `observer` before a rank's driver is made, `watch` once engines exist."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._registry = CollectorRegistry(auto_describe=False)
        self._first = Histogram(
            "vllm:time_to_first_token_seconds",
            "Time to first token in seconds.",
            _LABELS,
            buckets=_TTFT_BUCKETS_S,
            registry=self._registry,
        )
        self._next = Histogram(
            "vllm:inter_token_latency_seconds",
            "Inter-token latency in seconds.",
            _LABELS,
            buckets=_ITL_BUCKETS_S,
            registry=self._registry,
        )

    def observer(self, rank: int) -> Observer:
        """Feeds the latency histograms of one rank."""
        labels = (str(rank), self._model)
        return Observer(self._first.labels(*labels).observe, self._next.labels(*labels).observe)

    def watch(self, engines: Sequence[Engine]) -> None:
        self._registry.register(_EngineCollector(engines, self._model))

    def render(self) -> bytes:
        """The metrics in Prometheus' text format."""
        return generate_latest(self._registry)


class _EngineCollector(Collector):
    def __init__(self, engines: Sequence[Engine], model: str) -> None:
        self._engines = engines
        self._model = model

    def collect(self) -> Iterator[Metric]:
        counters = [engine.counters for engine in self._engines]
        yield self._gauge("num_requests_running", "Running requests.", [e.running for e in self._engines])
        yield self._gauge("num_requests_waiting", "Waiting requests.", [e.waiting for e in self._engines])
        usage = [engine.cache.usage for engine in self._engines]
        yield self._gauge("kv_cache_usage_perc", "KV cache usage, 1 = full.", usage)
        for name, help_text, values in (
            ("prefix_cache_queries", "Tokens looked up.", [c.prefix_queries for c in counters]),
            ("prefix_cache_hits", "Tokens found.", [c.prefix_hits for c in counters]),
            ("external_prefix_cache_hits", "Tokens pulled.", [c.pulled for c in counters]),
            ("num_preemptions", "Preemptions.", [c.preemptions for c in counters]),
            ("prompt_tokens", "Prompt tokens.", [c.prompt for c in counters]),
            ("generation_tokens", "Generated tokens.", [c.generated for c in counters]),
            ("nixl_num_kv_expired_reqs", "Leases nobody read.", [c.expired_leases for c in counters]),
        ):
            yield self._counter(name, help_text, values)
        yield self._cache_config()

    def _gauge(self, name: str, help_text: str, values: Sequence[float]) -> Metric:
        family = GaugeMetricFamily(f"vllm:{name}", help_text, labels=_LABELS)
        for rank, value in enumerate(values):
            family.add_metric([str(rank), self._model], value)
        return family

    def _counter(self, name: str, help_text: str, values: Sequence[float]) -> Metric:
        family = CounterMetricFamily(f"vllm:{name}", help_text, labels=_LABELS)
        for rank, value in enumerate(values):
            family.add_metric([str(rank), self._model], value)
        return family

    def _cache_config(self) -> Metric:
        names = (
            *("block_size", "enable_prefix_caching", "engine", "kv_cache_size_tokens"),
            *("num_gpu_blocks", "prefix_caching_hash_algo"),
        )
        family = GaugeMetricFamily("vllm:cache_config_info", "Information of the cache.", labels=names)
        for rank, engine in enumerate(self._engines):
            cache = engine.cache
            tokens = cache.blocks * cache.block_size
            values = [cache.block_size, True, rank, tokens, cache.blocks, ALGORITHM]
            family.add_metric([str(value) for value in values], 1)
        return family
