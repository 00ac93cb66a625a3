"""The charts of a report, as plotly.js figures."""

import html
from collections.abc import Sequence

from simulator.report.charts.chart import COLOURS, Chart, Document, line_of
from simulator.report.charts.goodput import goodput
from simulator.report.charts.instances import gauges, highest_gauges, load_variation
from simulator.report.charts.latency import cumulative, over_time
from simulator.report.charts.shares import outcomes, reuse, ttft_parts

__all__ = ["COLOURS", "Chart", "charts", "line_of"]


def charts(documents: Sequence[Document], names: Sequence[str]) -> list[Chart]:
    """All charts that these runs have data for; ``names`` are those of the runs."""
    shown = [html.escape(name, quote=False) for name in names]
    found = [
        outcomes(documents, shown),
        reuse(documents, shown),
        cumulative(documents, shown, "ttft", "Time to first token", "ttft_s"),
        cumulative(documents, shown, "tbt", "Token gaps, longest tenth (TBT)", "tbt_s"),
        goodput(documents, shown),
        over_time(documents, shown),
        ttft_parts(documents, shown),
        load_variation(documents, shown),
    ]
    highest = highest_gauges(documents)
    return [chart for chart in found if chart] + [
        gauges(number, document, names[number], highest)
        for number, document in enumerate(documents)
        if document["curves"]["heatmaps"]
    ]
