"""One chart: a plotly.js figure with its words.

Colours are named (``var(--series-1)``) and put in by the page, which knows whether it is light or dark. So that
the page can show and hide traces, their ``meta`` tells which ``run`` they show, or that they have a bar for each
(``by_run``), and which percentile over time they are (``choice``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

Document = Mapping[str, Any]
Trace = dict[str, Any]

BAR_PX, BARS_PX = 34, 110  # of a bar for one run, and of what is around them
COLOURS: Final = 8  # of runs: --series-1 to --series-8
_DASHES: Final = ("solid", "dash", "dot")


@dataclass(frozen=True, slots=True)
class Chart:
    """``figure`` has ``data`` and ``layout``; a chart of one ``run`` disappears with it."""

    key: str
    title: str
    caption: str
    figure: dict[str, Any]
    wide: bool = False
    run: int | None = None
    height_px: int = 340
    run_px: int = 0  # of that height, for each run


def line_of(run: int) -> dict[str, Any]:
    """One colour for each of eight runs, then the same colours dashed."""
    return {
        "color": f"var(--series-{run % COLOURS + 1})",
        "dash": _DASHES[run // COLOURS % len(_DASHES)],
        "width": 2,
    }
