"""Instances over time: how evenly they are loaded, and their gauges as heatmaps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from simulator.report.charts.chart import BAR_PX, BARS_PX, Chart, Document, Trace, line_of


def load_variation(documents: Sequence[Document], names: Sequence[str]) -> Chart | None:
    traces: list[Trace] = [
        {
            "type": "scatter",
            "mode": "lines",
            "name": name,
            "x": document["curves"]["load_variation"]["at_s"],
            "y": document["curves"]["load_variation"]["cv"],
            "line": {**line_of(run), "width": 1.5},
            "meta": {"run": run},
            "hovertemplate": "%{y:.2f}",
        }
        for run, (document, name) in enumerate(zip(documents, names, strict=True))
        if document["curves"]["load_variation"]
    ]
    if not traces:
        return None
    return Chart(
        key="load-variation",
        title="How unevenly instances are loaded",
        caption=(
            "Standard deviation by mean of the requests on the instances of a role: 0 is perfectly even. "
            "Following caches makes load uneven, and is worth it while queues stay short."
        ),
        figure={
            "data": traces,
            "layout": {
                "xaxis": {"title": {"text": "s since the start"}},
                "yaxis": {"title": {"text": "coefficient of variation"}, "rangemode": "tozero"},
                "hovermode": "x unified",
            },
        },
        height_px=max(240, BARS_PX + BAR_PX * len(documents)),  # as the bars beside it
    )


_GAUGES: Final = (
    ("running", "running", "requests"),
    ("waiting", "waiting", "requests"),
    ("kv_usage", "KV memory", "%"),
)
_WIDTH, _GAP = 0.29, 0.065  # of the chart's width


def gauges(run: int, document: Document, name: str, highest: Mapping[str, float]) -> Chart:
    """Three heatmaps side by side; ``highest`` is where their colours end, in all runs."""
    maps = document["curves"]["heatmaps"]
    traces: list[Trace] = []
    layout: dict[str, Any] = {"annotations": [], "margin": {"t": 26, "r": 46}}
    for number, (gauge, label, unit) in enumerate(_GAUGES):
        left = number * (_WIDTH + _GAP)
        suffix = "" if number == 0 else str(number + 1)
        traces.append(_heatmap(maps, gauge, f"{label}: %{{z:,}} {unit}", suffix, left, highest[gauge]))
        layout[f"xaxis{suffix}"] = {
            "domain": [left, left + _WIDTH],
            "anchor": f"y{suffix}",
            "title": {"text": "s since the start"},
            "showgrid": False,
            "nticks": 5,
        }
        layout[f"yaxis{suffix}"] = {
            "anchor": f"x{suffix}",
            "autorange": "reversed",
            "type": "category",
            "showgrid": False,
            "showticklabels": number == 0,
        }
        layout["annotations"].append(
            {
                "text": f"<b>{label}</b>, {unit}",
                "x": left,
                "xref": "paper",
                "xanchor": "left",
                "y": 1.0,
                "yref": "paper",
                "yanchor": "bottom",
                "showarrow": False,
            }
        )
    caption = (
        f"Each row is an instance, each column {maps['step_s']:,.0f} s: its mean of running requests and of KV "
        "memory in use, and its longest queue. A strong row beside faint ones is a hot spot. Colours mean the "
        "same in all runs."
    )
    return Chart(
        key=f"gauges-{run}",
        title=f"Instances over time: {name}",
        caption=caption if run == 0 else "",
        figure={"data": traces, "layout": layout},
        wide=True,
        run=run,
        height_px=130 + max(90, min(18 * len(maps["instances"]), 600)),
    )


def highest_gauges(documents: Sequence[Document]) -> dict[str, float]:
    """The most that any run has of each gauge; KV memory counts to 100 %."""
    highest = {"running": 1.0, "waiting": 1.0, "kv_usage": 100.0}
    for document in documents:
        maps = document["curves"]["heatmaps"] or {"running": [], "waiting": []}
        for gauge in ("running", "waiting"):
            highest[gauge] = max([highest[gauge], *(max(row) for row in maps[gauge])])
    return highest


def _heatmap(
    maps: Mapping[str, Any], gauge: str, text: str, suffix: str, left: float, highest: float
) -> Trace:
    columns = len(maps[gauge][0])
    return {
        "type": "heatmap",
        "x": [maps["start_s"] + maps["step_s"] * (column + 0.5) for column in range(columns)],
        "y": maps["instances"],
        "z": maps[gauge],
        "zmin": 0,
        "zmax": highest,
        "colorscale": [
            [0, "var(--heat-0)"],
            [0.5, f"var(--heat-{gauge}-1)"],
            [1, f"var(--heat-{gauge}-2)"],
        ],
        "colorbar": {"x": left + _WIDTH + 0.003, "thickness": 8, "outlinewidth": 0, "len": 1.0, "nticks": 4},
        "xaxis": f"x{suffix}",
        "yaxis": f"y{suffix}",
        "hovertemplate": f"%{{y}} at %{{x:,.0f}} s<br>{text}<extra></extra>",
    }
