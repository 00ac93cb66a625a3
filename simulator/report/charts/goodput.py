"""Goodput over the rate of requests."""

from __future__ import annotations

import html
from collections.abc import Sequence

from simulator.report.charts.chart import Chart, Document, Trace, line_of
from simulator.report.rate_sweep import rate_series


def goodput(documents: Sequence[Document], names: Sequence[str]) -> Chart | None:
    """Over the rate of requests, for runs that differ in little else."""
    series = rate_series(documents, names)
    if not series:
        return None
    traces: list[Trace] = [
        {
            "type": "scatter",
            "mode": "lines+markers",
            "name": html.escape(each.label, quote=False),
            "x": [rate for rate, _ in each.points],
            "y": [goodput for _, goodput in each.points],
            "line": line_of(number),
            "marker": {"size": 7},
            "hovertemplate": "%{y:.2f} good of %{x:.2f} requests/s",
        }
        for number, each in enumerate(series)
    ]
    highest = max(rate for each in series for rate, _ in each.points)
    traces.append(
        {
            "type": "scatter",
            "mode": "lines",
            "name": "all are good",
            "x": [0, highest],
            "y": [0, highest],
            "line": {"color": "var(--muted)", "dash": "dash", "width": 1.5},
            "hoverinfo": "skip",
        }
    )
    return Chart(
        key="goodput",
        title="Goodput against rate",
        caption=(
            "Requests per second that met both objectives, by requests offered per second. A run follows the "
            "dashed line until it saturates; where it falls off is its capacity."
        ),
        figure={
            "data": traces,
            "layout": {
                "xaxis": {"title": {"text": "requests offered per second"}, "rangemode": "tozero"},
                "yaxis": {"title": {"text": "good requests per second"}, "rangemode": "tozero"},
                "showlegend": True,
            },
        },
        wide=True,
    )
