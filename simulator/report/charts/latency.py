"""How long requests take: distributions, and percentiles over time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from simulator.report.charts.chart import Chart, Document, Trace, line_of

_LOG_FROM: Final = 8.0  # times the median, at the 99th percentile: then the tail needs a logarithmic axis
_NEAR, _NEAR_LOG = 0.6, 0.2  # of the longest time: from there on a label would run out of the chart


def cumulative(
    documents: Sequence[Document], names: Sequence[str], key: str, title: str, objective: str
) -> Chart | None:
    traces: list[Trace] = []
    for run, (document, name) in enumerate(zip(documents, names, strict=True)):
        curve = document["curves"][key]
        traces.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": name,
                "x": curve["ms"],
                "y": curve["percent"],
                "line": {**line_of(run), "shape": "hv"},
                "meta": {"run": run},
                "hovertemplate": "%{y:.1f} % within %{x:,.0f} ms",
            }
        )
    if not any(trace["x"] for trace in traces):
        return None
    statistics = [d["summary"][_STATISTICS[key]] for d in documents if d["summary"][_STATISTICS[key]]]
    spread = max(s["p99"] for s in statistics) > _LOG_FROM * max(1.0, min(s["p50"] for s in statistics))
    longest_ms = max(s["max"] for s in statistics)
    for objective_s in sorted({document["objectives"][objective] for document in documents}):
        traces.append(_objective(objective_s * 1e3, longest_ms * (_NEAR_LOG if spread else _NEAR)))
    return Chart(
        key=f"cdf-{key}",
        title=f"{title}",
        caption=(
            "Share of all requests within a time: further left and higher is better. Where a curve crosses the "
            "dashed objective is the share that meets it. Requests that were not served keep it below 100\u00a0%."
        ),
        figure={
            "data": traces,
            "layout": {
                "xaxis": {
                    "title": {"text": "ms"},
                    **(_log_axis(1, 3) if spread else {"rangemode": "tozero"}),
                },
                "yaxis": {"title": {"text": "% of requests"}, "range": [0, 101]},
                "hovermode": "closest",
            },
        },
    )


_STATISTICS: Final = {"ttft": "time_to_first_token", "tbt": "longest_tenth_token_latency"}
_DECADES: Final = range(-1, 7)  # of milliseconds


def _log_axis(*steps: int) -> dict[str, Any]:
    """With numbers in full at these steps of each power of ten."""
    ticks = [step * 10.0**power for power in _DECADES for step in steps]
    return {"type": "log", "tickvals": ticks, "ticktext": [f"{tick:,g}" for tick in ticks]}


def _objective(objective_ms: float, near_the_edge_ms: float) -> Trace:
    text = f"objective {objective_ms:,g} ms"
    return {
        "type": "scatter",
        "mode": "lines+text",
        "name": text,
        "x": [objective_ms] * 2,
        "y": [0, 101],
        "line": {"color": "var(--muted)", "dash": "dash", "width": 1.5},
        "text": [f" {text} ", ""],
        "textposition": "top left" if objective_ms > near_the_edge_ms else "top right",
        "textfont": {"color": "var(--muted)", "size": 11},
        "hoverinfo": "skip",
    }


def over_time(documents: Sequence[Document], names: Sequence[str]) -> Chart | None:
    traces: list[Trace] = []
    alone = len(documents) == 1
    for run, (document, name) in enumerate(zip(documents, names, strict=True)):
        curve = document["curves"]["ttft_over_time"]
        for order, which in enumerate(("p50", "p95", "p99")):
            line = line_of(run) if not alone else {"color": f"var(--level-{order + 1})", "width": 2}
            traces.append(
                {
                    "type": "scatter",
                    "mode": "lines",
                    "name": which if alone else name,
                    "x": curve["at_s"],
                    "y": curve[which],
                    "line": line,
                    "meta": {"run": run} if alone else {"run": run, "choice": which},
                    "hovertemplate": "%{y:,.0f} ms",
                }
            )
    if not any(trace["x"] for trace in traces):
        return None
    windows_s = sorted({document["curves"]["ttft_over_time"]["window_s"] for document in documents})
    window = " to ".join(f"{each:,.0f}" for each in {windows_s[0]: 0, windows_s[-1]: 0})
    objectives_s = sorted({document["objectives"]["ttft_s"] for document in documents})
    return Chart(
        key="ttft-over-time",
        title="Time to first token over the run",
        caption=(
            f"Rolling percentiles over the requests that arrived within {window} s. Look for bursts that one run "
            "absorbs and another does not, and for a rise that never comes back: an overloaded cluster."
        ),
        figure={
            "data": traces,
            "layout": {
                "xaxis": {"title": {"text": "s since the start"}},
                "yaxis": {"title": {"text": "ms"}, **_log_axis(1, 2, 5)},
                "shapes": [
                    {
                        "type": "line",
                        "xref": "paper",
                        "x0": 0,
                        "x1": 1,
                        "y0": each * 1e3,
                        "y1": each * 1e3,
                        "line": {"color": "var(--muted)", "dash": "dash", "width": 1.5},
                    }
                    for each in objectives_s
                ],
                "hovermode": "x unified",
                "showlegend": alone,
            },
        },
        wide=True,
    )
