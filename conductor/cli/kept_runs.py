"""Runs that `conductor replay` keeps: files for `conductor report`, a page, and traces for Perfetto."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from simulator.cluster import Outage, Simulated
from simulator.report import Run, html_report, write_chrome_trace, write_run_file


def keep_runs(
    runs: Sequence[Run], title: str, *, save: Path | None, html: Path | None, outages: Sequence[Outage] = ()
) -> list[Path]:
    """What was written: in the existing folder ``save`` a run file and a trace for each, and the page ``html``.

    Raises OSError.
    """
    written = []
    if save is not None:
        for run in runs:
            write_run_file(save / f"{run.name}.json", run)
            written.append(save / f"{run.name}.json")
            if isinstance(run.simulated, Simulated):
                write_chrome_trace(save / f"{run.name}.trace.json.gz", run.simulated, outages)
                written.append(save / f"{run.name}.trace.json.gz")
    if html is not None:
        html.write_text(html_report(title, runs), encoding="utf-8")
        written.append(html)
    return written
