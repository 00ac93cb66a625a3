"""How far a run is from what no scheduler could exceed."""

from __future__ import annotations

from typing import Any, Protocol

from simulator.report.statistics import ratio, rounded


class Bounds(Protocol):
    """Of one workload on one cluster; ratios are of prompt tokens.

    Reuse is bounded twice: by caches of the cluster's whole capacity that know the future, and by caches without
    limit.
    """

    @property
    def mean_ttft_s(self) -> float: ...

    @property
    def good_requests(self) -> float: ...

    @property
    def reuse_ratio_capacity(self) -> float: ...

    @property
    def reuse_ratio_unlimited(self) -> float: ...


def bounds_and_gaps(
    bounds: Bounds | None,
    *,
    mean_ttft_s: float | None,
    good_requests: int,
    reuse_ratio: float,
    all_served: bool,
) -> dict[str, Any]:
    """The keys ``bounds`` and ``gaps`` of a summary; both None without bounds.

    The gap of TTFT is None when requests were not served: the bound is on the mean of all.
    """
    if bounds is None:
        return {"bounds": None, "gaps": None}
    comparable = all_served and mean_ttft_s is not None and bounds.mean_ttft_s > 0.0
    return {
        "bounds": {
            "mean_time_to_first_token": rounded(bounds.mean_ttft_s * 1e3),
            "good_request_count": rounded(bounds.good_requests),
            "prefix_cache_reused_ratio_capacity": rounded(bounds.reuse_ratio_capacity),
            "prefix_cache_reused_ratio_unlimited": rounded(bounds.reuse_ratio_unlimited),
        },
        "gaps": {
            "mean_time_to_first_token_ratio": (
                rounded(mean_ttft_s / bounds.mean_ttft_s) if comparable and mean_ttft_s is not None else None
            ),
            "good_request_fraction_of_bound": _share(good_requests, bounds.good_requests),
            "reuse_fraction_of_capacity_bound": _share(reuse_ratio, bounds.reuse_ratio_capacity),
            "reuse_fraction_of_unlimited_bound": _share(reuse_ratio, bounds.reuse_ratio_unlimited),
        },
    }


def _share(reached: float, bound: float) -> float | None:
    """None of a bound of zero: nothing could be reached."""
    return ratio(reached, bound) if bound > 0.0 else None
