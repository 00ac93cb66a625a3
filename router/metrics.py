"""Prometheus metrics of the front door.

Counting happens in plain attributes, ten times per request and all on one thread; they are turned into
Prometheus samples when they are scraped. That costs a fifth of what prometheus_client's locked values do.
Observed seconds are only noted at first, and put into their buckets together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import StrEnum
from math import inf
from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from conductor.placement import FailureKind, TokenSource
from router.token_cache import TokenCacheState

TTFT_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2, 4, 8, 15, 30, 60)
ITL_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1)
PLACEMENT_BUCKETS_S = (0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.1)
REQUEST_BUCKETS_S = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)


class HedgeOutcome(StrEnum):
    """What became of asking a second instance beside one that was late."""

    WON = "won"  # it answered first, or the first one failed
    LOST = "lost"  # the first one did, or the client left
    FAILED = "failed"
    NO_BUDGET = "no budget"  # nobody was asked: too many retries and hedges already
    NO_INSTANCE = "no instance"  # nobody could take it


class Distribution:
    """Counts of observed seconds per bucket, and their sum. ``settle`` now and then: until then all are kept."""

    __slots__ = ("_bounds", "_counts", "_noted", "_sum_s", "observe")

    def __init__(self, bounds_s: tuple[float, ...]) -> None:
        self._bounds = bounds_s
        self._counts = np.zeros(len(bounds_s) + 1, np.int64)
        self._sum_s = 0.0
        self._noted: list[float] = []
        self.observe: Callable[[float], None] = self._noted.append  # seconds

    def settle(self) -> None:
        """Count what was observed since the last time."""
        noted = self._noted
        if noted:
            buckets = np.searchsorted(self._bounds, noted)
            self._counts += np.bincount(buckets, minlength=len(self._counts))
            self._sum_s += sum(noted)
            noted.clear()

    def family(self, name: str, documentation: str) -> HistogramMetricFamily:
        self.settle()
        total = 0
        buckets: list[tuple[str, float]] = []
        for bound, count in zip((*self._bounds, inf), self._counts.tolist(), strict=True):
            total += count
            buckets.append(("+Inf" if bound == inf else str(float(bound)), float(total)))
        return HistogramMetricFamily(name, documentation, buckets=buckets, sum_value=self._sum_s)


class RouterMetrics(Collector):
    """What the front door counts; ``registry`` is rendered by GET /metrics.

    ``requests`` is keyed by (model, endpoint, code); its models must come from a bounded set.
    """

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.requests: defaultdict[tuple[str, str, int], int] = defaultdict(int)
        self.ttft_s = Distribution(TTFT_BUCKETS_S)
        self.itl_s = Distribution(ITL_BUCKETS_S)
        self.request_s = Distribution(REQUEST_BUCKETS_S)
        self.placement_s = Distribution(PLACEMENT_BUCKETS_S)
        self.inflight_requests: Callable[[], int] = lambda: 0
        self.retries = dict.fromkeys(FailureKind, 0)
        self.retries_denied = dict.fromkeys(FailureKind, 0)
        self.hedges = dict.fromkeys(HedgeOutcome, 0)
        self.retry_tokens: Callable[[], Mapping[str, float]] = dict
        self.token_source = dict.fromkeys(TokenSource, 0)
        self.tokenization_failures = dict.fromkeys(TokenSource, 0)
        self.token_caches: Callable[[], Mapping[str, TokenCacheState]] = dict
        self.overlap_tokens = 0
        self.prompt_tokens = 0
        self.stream_failures = 0
        self.handoffs_without_transfer = 0
        self.prompts_passed_as_tokens = 0
        self.registry = registry or CollectorRegistry()
        self.registry.register(self)

    def settle(self) -> None:
        """To be called now and then, so that little is kept of what was observed."""
        for each in (self.ttft_s, self.itl_s, self.request_s, self.placement_s):
            each.settle()

    def collect(self) -> Iterator[Metric]:
        requests = CounterMetricFamily(
            "conductor_requests",
            "Inference requests answered, by the status code the client got (499: it went away).",
            labels=("model", "endpoint", "code"),
        )
        for (model, endpoint, code), count in self.requests.items():
            requests.add_metric((model, endpoint, str(code)), count)
        yield requests
        yield self.ttft_s.family(
            "conductor_ttft_seconds", "From the complete request to the first response body byte."
        )
        yield self.itl_s.family(
            "conductor_itl_seconds", "Mean gap between the tokens of a streamed response."
        )
        yield self.request_s.family(
            "conductor_request_seconds", "From the complete request to the last response byte."
        )
        yield self.placement_s.family("conductor_placement_seconds", "Time one placement decision took.")
        yield GaugeMetricFamily(
            "conductor_inflight_requests", "Inference requests in progress.", self.inflight_requests()
        )
        yield _labelled("conductor_retries", "Placements tried again.", "reason", self.retries)
        yield _labelled(
            "conductor_retries_denied",
            "Requests that were not tried again because the retry budget was spent.",
            "reason",
            self.retries_denied,
        )
        yield _labelled(
            "conductor_hedges",
            "Second instances asked, or not, when the first was late.",
            "outcome",
            self.hedges,
        )
        tokens = GaugeMetricFamily(
            "conductor_retry_budget", "Further attempts that may be made now.", labels=("model",)
        )
        for model, left in self.retry_tokens().items():
            tokens.add_metric((model,), left)
        yield tokens
        yield _labelled(
            "conductor_token_source",
            "Where the prompt tokens of requests came from.",
            "source",
            self.token_source,
        )
        yield _labelled(
            "conductor_tokenization_failures",
            "Prompts that a source could not tokenize; without another source, load alone places them.",
            "source",
            self.tokenization_failures,
        )
        yield from _token_caches(self.token_caches())
        yield from _counters(
            ("conductor_overlap_tokens", "Prompt tokens expected in the cache.", self.overlap_tokens),
            ("conductor_prompt_tokens", "Prompt tokens of placed requests.", self.prompt_tokens),
            (
                "conductor_stream_failures",
                "Responses that broke after their first byte had been sent.",
                self.stream_failures,
            ),
            (
                "conductor_handoffs_without_transfer",
                "Prefill legs without KV transfer; the decode instance computed the prompt again.",
                self.handoffs_without_transfer,
            ),
            (
                "conductor_prompts_passed_as_tokens",
                "Completion prompts that engines got as token ids instead of text.",
                self.prompts_passed_as_tokens,
            ),
        )


def _labelled(name: str, documentation: str, label: str, counts: Mapping[Any, int]) -> Metric:
    """The keys are members of an enumeration."""
    family = CounterMetricFamily(name, documentation, labels=(label,))
    for key, count in counts.items():
        family.add_metric((key.value,), count)
    return family


def _counters(*counters: tuple[str, str, int]) -> Iterable[Metric]:
    for name, documentation, value in counters:
        yield CounterMetricFamily(name, documentation, value)


def _token_caches(states: Mapping[str, TokenCacheState]) -> Iterable[Metric]:
    enabled = GaugeMetricFamily(
        "conductor_token_cache_enabled",
        "1 where tokens of earlier turns are kept; otherwise the label says why not.",
        labels=("model", "off"),
    )
    kept = GaugeMetricFamily("conductor_token_cache_bytes", "Text and tokens kept.", labels=("model",))
    characters = CounterMetricFamily(
        "conductor_token_cache_characters",
        "Characters of prompts whose tokens were known, and that were tokenized.",
        labels=("model", "tokens"),
    )
    for model, state in states.items():
        enabled.add_metric((model, state.off or ""), float(state.off is None))
        kept.add_metric((model,), state.kept_bytes)
        characters.add_metric((model, "known"), state.known_characters)
        characters.add_metric((model, "new"), state.new_characters)
    yield from (enabled, kept, characters)
