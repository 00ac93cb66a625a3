"""Prometheus metrics of the front door; label children are looked up once and kept."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from conductor.placement import TokenSource

TTFT_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2, 4, 8, 15, 30, 60)
ITL_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1)
REQUEST_BUCKETS_S = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)


class RouterMetrics:
    """``registry`` is rendered by GET /metrics."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry or CollectorRegistry()
        self._requests = Counter(
            "conductor_requests_total",
            "Inference requests answered, by the status code the client got (499: it went away).",
            ("model", "endpoint", "code"),
            registry=self.registry,
        )
        self.ttft_s = Histogram(
            "conductor_ttft_seconds",
            "From the complete request to the first response body byte.",
            buckets=TTFT_BUCKETS_S,
            registry=self.registry,
        )
        self.itl_s = Histogram(
            "conductor_itl_seconds",
            "Mean gap between the tokens of a streamed response.",
            buckets=ITL_BUCKETS_S,
            registry=self.registry,
        )
        self.request_s = Histogram(
            "conductor_request_seconds",
            "From the complete request to the last response byte.",
            buckets=REQUEST_BUCKETS_S,
            registry=self.registry,
        )
        self.inflight_requests = Gauge(
            "conductor_inflight_requests", "Inference requests in progress.", registry=self.registry
        )
        self._retries = Counter(
            "conductor_retries_total", "Placements tried again.", ("reason",), registry=self.registry
        )
        sources = Counter(
            "conductor_token_source_total",
            "Where the prompt tokens of requests came from.",
            ("source",),
            registry=self.registry,
        )
        self.token_source = {source: sources.labels(source.value) for source in TokenSource}
        self._tokenization_failures = Counter(
            "conductor_tokenization_failures_total",
            "Prompts that could not be tokenized; they were placed by load alone.",
            ("source",),
            registry=self.registry,
        )
        self.overlap_tokens = Counter(
            "conductor_overlap_tokens_total",
            "Prompt tokens that were expected to be cached where the request was placed.",
            registry=self.registry,
        )
        self.prompt_tokens = Counter(
            "conductor_prompt_tokens_total", "Prompt tokens placed.", registry=self.registry
        )
        self.stream_failures = Counter(
            "conductor_stream_failures_total",
            "Responses that broke after their first byte had been sent.",
            registry=self.registry,
        )
        self.handoffs_without_transfer = Counter(
            "conductor_handoffs_without_transfer_total",
            "Prefill legs that offered no KV transfer; the decode instance computed the prompt again.",
            registry=self.registry,
        )
        self._request_children: dict[tuple[str, str, int], Counter] = {}

    def request(self, model: str, endpoint: str, code: int) -> None:
        """Count one answered request. ``model`` must come from a bounded set."""
        key = (model, endpoint, code)
        child = self._request_children.get(key)
        if child is None:
            child = self._request_children[key] = self._requests.labels(model, endpoint, str(code))
        child.inc()

    def retry(self, reason: str) -> None:
        self._retries.labels(reason).inc()

    def tokenization_failure(self, source: TokenSource) -> None:
        self._tokenization_failures.labels(source.value).inc()
