"""Prometheus metrics by tenant; the tenants are those of the configured keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from router.accounts import TenantCounts


class TenantMetrics(Collector):
    def __init__(self, tenants: Mapping[str, TenantCounts]) -> None:
        self._tenants = tenants

    def collect(self) -> Iterator[Metric]:
        requests = CounterMetricFamily(
            "conductor_tenant_requests",
            "Inference requests answered, by the status code the client got.",
            labels=("tenant", "code"),
        )
        tokens = CounterMetricFamily(
            "conductor_tenant_tokens", "Tokens of answered requests.", labels=("tenant", "kind")
        )
        refused = CounterMetricFamily(
            "conductor_tenant_refused",
            "Requests beyond a limit of their key.",
            labels=("tenant", "limit"),
        )
        active = GaugeMetricFamily(
            "conductor_tenant_active_requests", "Inference requests in progress.", labels=("tenant",)
        )
        for name, counts in self._tenants.items():
            for code, count in counts.requests.items():
                requests.add_metric((name, str(code)), count)
            tokens.add_metric((name, "prompt"), counts.prompt_tokens)
            tokens.add_metric((name, "output"), counts.output_tokens)
            for limit, count in counts.refused.items():
                refused.add_metric((name, limit), count)
            active.add_metric((name,), counts.active)
        yield from (requests, tokens, refused, active)
