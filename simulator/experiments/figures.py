"""Figures by name, in the units in which papers and tables have them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from simulator.experiments.point import Figures


@dataclass(frozen=True, slots=True)
class Figure:
    """``value`` finds it in a point's figures; None where the point has none. The heading has its unit."""

    heading: str
    digits: int
    value: Callable[[Figures], float | None]

    def text(self, value: float | None) -> str:
        return "-" if value is None else f"{value:,.{self.digits}f}"


def _rejected_percent(figures: Figures) -> float | None:
    outcomes = figures.get("outcomes")
    return 100.0 * outcomes["rejected"] / sum(outcomes.values()) if outcomes else None


def _moved_gb(figures: Figures) -> float | None:
    kinds = figures.get("tier_actions")
    if kinds is None:
        return None
    moved: int = sum(done["moved_bytes"] for outcomes in kinds.values() for done in outcomes.values())
    return moved / 1e9


def _traffic_gb(which: str) -> Callable[[Figures], float | None]:
    """Of all tiers slower than the hosts."""

    def value(figures: Figures) -> float | None:
        tiers = figures.get("tier_traffic")
        if not tiers:
            return None
        bytes_: float = sum(each[which] for tier, each in tiers.items() if tier != "host")
        return bytes_ / 1e9

    return value


def _at(*path: str, scale: float = 1.0) -> Callable[[Mapping[str, Any]], float | None]:
    def value(figures: Mapping[str, Any]) -> float | None:
        found: Any = figures
        for part in path:
            found = None if found is None else found.get(part)
        return None if found is None else float(found) * scale

    return value


FIGURES: Final[dict[str, Figure]] = {
    "good_percent": Figure("good %", 1, _at("good_request_fraction", scale=100)),
    "ttft_met_percent": Figure("TTFT met %", 1, _at("ttft_fraction", scale=100)),
    "tbt_met_percent": Figure("TBT met %", 1, _at("tbt_fraction", scale=100)),
    "goodput": Figure("good/s", 2, _at("goodput")),
    "mean_ttft_s": Figure("mean TTFT s", 3, _at("time_to_first_token", "avg", scale=1e-3)),
    "p50_ttft_s": Figure("p50 TTFT s", 3, _at("time_to_first_token", "p50", scale=1e-3)),
    "p90_ttft_s": Figure("p90 TTFT s", 3, _at("time_to_first_token", "p90", scale=1e-3)),
    "p99_ttft_s": Figure("p99 TTFT s", 3, _at("time_to_first_token", "p99", scale=1e-3)),
    "mean_tbt_ms": Figure("mean TBT ms", 1, _at("longest_tenth_token_latency", "avg")),
    "p99_tbt_ms": Figure("p99 TBT ms", 1, _at("longest_tenth_token_latency", "p99")),
    "mean_itl_ms": Figure("mean ITL ms", 1, _at("inter_token_latency", "avg")),
    "reuse_percent": Figure("reuse %", 1, _at("prefix_cache_reused_ratio", scale=100)),
    "device_percent": Figure("from device %", 1, _at("reuse_by_tier", "device", "ratio", scale=100)),
    "host_percent": Figure("from host %", 1, _at("reuse_by_tier", "host", "ratio", scale=100)),
    "disk_percent": Figure("from disk %", 1, _at("reuse_by_tier", "disk", "ratio", scale=100)),
    "remote_percent": Figure("from pool %", 1, _at("reuse_by_tier", "remote", "ratio", scale=100)),
    "moved_gb": Figure("moved GB", 0, _moved_gb),
    "carried_gb": Figure("carried GB", 0, _traffic_gb("carried_bytes")),
    "written_gb": Figure("written GB", 0, _traffic_gb("written_bytes")),
    "load_variation": Figure("load CV", 2, _at("load_variation")),
    "requests": Figure("served", 0, _at("request_count")),
    "rejected": Figure("rejected", 0, _at("outcomes", "rejected")),
    "rejected_percent": Figure("rejected %", 1, _rejected_percent),
    "failed": Figure("failed", 0, _at("outcomes", "failed")),
    "retries": Figure("retries", 0, _at("retries")),
    "not_served": Figure("not served", 0, _at("error_request_count")),
    "requests_per_s": Figure("requests/s", 2, _at("request_throughput")),
    "output_tokens_per_s": Figure("output tokens/s", 0, _at("output_token_throughput")),
    "prefill_s_per_request": Figure("prefill s a request", 3, _at("prefill_busy_s_per_request")),
    "ttft_by_bound": Figure("mean TTFT / bound", 2, _at("gaps", "mean_time_to_first_token_ratio")),
    "good_of_bound_percent": Figure(
        "good, % of bound", 1, _at("gaps", "good_request_fraction_of_bound", scale=100)
    ),
    "reuse_of_bound_percent": Figure(
        "reuse, % of bound", 1, _at("gaps", "reuse_fraction_of_capacity_bound", scale=100)
    ),
    "highest_rate": Figure("highest rate, 1/s", 2, _at("highest_rate")),
}

USUAL: Final = (
    "good_percent",
    "mean_ttft_s",
    "p99_ttft_s",
    "mean_tbt_ms",
    "p99_tbt_ms",
    "reuse_percent",
    "not_served",
)
OF_BOUNDS: Final = ("ttft_by_bound", "good_of_bound_percent", "reuse_of_bound_percent")
