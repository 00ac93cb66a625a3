"""Bars of every run: outcomes, reuse by tier, and what the first token waits for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from simulator.report.charts.chart import BAR_PX, BARS_PX, Chart, Document, Trace

_TIERS: Final = (
    ("device", "device"),
    ("host", "host memory"),
    ("disk", "disk"),
    ("pod", "pool of the pod"),
    ("remote", "remote pool"),
    ("peer", "device of a peer"),
    ("unknown", "not told apart"),
)


def outcomes(documents: Sequence[Document], names: Sequence[str]) -> Chart:
    kinds: dict[str, list[float]] = {label: [] for label in _OUTCOMES}
    for document in documents:
        figures = document["summary"]
        outcomes = figures["outcomes"]
        requests = figures["request_count"] + figures["error_request_count"]
        good = figures["good_request_count"]
        early, steady = (round(figures[f"{key}_fraction"] * requests) for key in ("ttft", "tbt"))
        counts = (
            good,
            steady - good,
            early - good,
            figures["request_count"] - early - steady + good,
            outcomes["rejected"],
            outcomes["refused"],
            outcomes["failed"],
        )
        for label, count in zip(kinds, counts, strict=True):
            kinds[label].append(count)
    totals = [sum(column) or 1 for column in zip(*kinds.values(), strict=True)]
    traces = [
        _bars(
            label,
            names,
            [round(count / total * 100, 3) for count, total in zip(counts, totals, strict=True)],
            _OUTCOMES[label],
            counts,
            "%{customdata:,} requests, %{x:.1f} %",
        )
        for label, counts in kinds.items()
        if any(counts)
    ]
    return Chart(
        key="outcomes",
        title="What became of the requests",
        caption="Good requests met both objectives. The rest tells what to mend: prefill, decode, or admission.",
        figure={"data": traces, "layout": _bar_layout("% of requests", [0, 100])},
        height_px=BARS_PX + BAR_PX * len(names),
        run_px=BAR_PX,
    )


_OUTCOMES: Final = {
    "good": "var(--good)",
    "first token late": "var(--late)",
    "tokens slow": "var(--slow)",
    "both": "var(--both)",
    "rejected by admission": "var(--rejected)",
    "too long for every instance": "var(--refused)",
    "failed": "var(--failed)",
}


def reuse(documents: Sequence[Document], names: Sequence[str]) -> Chart:
    traces = []
    for tier, label in _TIERS:
        of_runs = [_reused(document["summary"], tier) for document in documents]
        if any(tokens for _, tokens in of_runs):
            traces.append(
                _bars(
                    label,
                    names,
                    [round(ratio * 100, 3) for ratio, _ in of_runs],
                    f"var(--tier-{tier})",
                    [tokens for _, tokens in of_runs],
                    "%{customdata:,} tokens, %{x:.1f} %",
                )
            )
    for key, label, colour in (
        ("capacity", "bound at this capacity", "var(--ink)"),
        ("unlimited", "bound without limit", "var(--muted)"),
    ):
        bounds = [document["summary"]["bounds"] for document in documents]
        if any(bounds):
            traces.append(
                {
                    "type": "scatter",
                    "mode": "markers",
                    "name": label,
                    "y": list(names),
                    "x": [b and round(b[f"prefix_cache_reused_ratio_{key}"] * 100, 3) for b in bounds],
                    "marker": {
                        "symbol": "line-ns",
                        "size": 20,
                        "line": {"color": colour, "width": 2.5},
                        "color": colour,
                    },
                    "meta": {"by_run": True},
                    "hovertemplate": f"{label}: %{{x:.1f}} %<extra></extra>",
                }
            )
    return Chart(
        key="reuse",
        title="Prompt tokens reused, by where they were",
        caption=(
            "Reused tokens need no prefill; those on the device cost nothing, those of slower tiers a load. Marks, "
            "where bounds are known, are the most that any scheduler could reuse."
        ),
        figure={"data": traces, "layout": _bar_layout("% of prompt tokens", None)},
        height_px=BARS_PX + BAR_PX * len(names),
        run_px=BAR_PX,
    )


def _reused(figures: Mapping[str, Any], tier: str) -> tuple[float, int]:
    """Ratio to prompt tokens, and tokens. A run that does not tell tiers apart has one, ``unknown``."""
    if figures["reuse_by_tier"] is None:
        if tier == "unknown":
            return figures["prefix_cache_reused_ratio"], figures["total_usage_prompt_cache_read_tokens"]
        return 0.0, 0
    of_tier = figures["reuse_by_tier"].get(tier, {"ratio": 0.0, "tokens": 0})
    return of_tier["ratio"], of_tier["tokens"]


def ttft_parts(documents: Sequence[Document], names: Sequence[str]) -> Chart | None:
    known = [_known_parts(document["summary"]) for document in documents]
    traces = [
        _bars(label, names, means, f"var(--part-{key})", means, "%{x:,.0f} ms")
        for key, label in _PARTS.items()
        if any(means := [parts.get(key, 0.0) for parts in known])
    ]
    if not traces:
        return None
    return Chart(
        key="ttft-parts",
        title="What the first token waits for",
        caption=(
            "Means, one after the other. A long queue asks for prefill capacity or reuse, a long hand-off for "
            "faster links."
        ),
        figure={"data": traces, "layout": _bar_layout("ms", None)},
        height_px=BARS_PX + BAR_PX * len(names),
        run_px=BAR_PX,
    )


def _known_parts(figures: Mapping[str, Any]) -> dict[str, float]:
    """Milliseconds by part; what is not told apart is ``rest``, so that they add up to the mean."""
    if figures["time_to_first_token"] is None:
        return {}
    parts = {key: mean for key, mean in figures["time_to_first_token_parts"].items() if mean is not None}
    rest = figures["time_to_first_token"]["avg"] - sum(parts.values())
    return {**parts, "rest": round(rest, 3)} if rest > _NEGLIGIBLE_MS else parts


_NEGLIGIBLE_MS: Final = 0.5
_PARTS: Final = {
    "queue": "queue and loads",
    "prefill": "prefill",
    "hand_off": "hand-off",
    "first_step": "first decode step",
    "rest": "not told apart",
}


def _bars(
    label: str,
    names: Sequence[str],
    values: Sequence[float | None],
    colour: str,
    details: Sequence[float | None],
    text: str,
) -> Trace:
    return {
        "type": "bar",
        "orientation": "h",
        "name": label,
        "y": list(names),
        "x": list(values),
        "customdata": list(details),
        "marker": {"color": colour, "line": {"color": "var(--card)", "width": 1}},
        "meta": {"by_run": True},
        "hovertemplate": f"{label}: {text}<extra></extra>",
    }


def _bar_layout(unit: str, limits: list[float] | None) -> dict[str, Any]:
    return {
        "barmode": "stack",
        "bargap": 0.35,
        "xaxis": {
            "title": {"text": unit},
            "tickformat": ",",
            **({"range": limits} if limits else {"rangemode": "tozero"}),
        },
        "yaxis": {"autorange": "reversed", "type": "category", "showgrid": False},
        "hovermode": "closest",
        "showlegend": True,
    }
