"""A run in one JSON document: its configuration, its figures and what charts need; and such documents in files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import orjson
from pydantic import ValidationError

from conductor.placement import Objectives
from simulator.cluster.results import Simulated
from simulator.report.bounds import Bounds
from simulator.report.curves import cumulative, heatmaps, load_variation_over_time, rolling
from simulator.report.measured import Measured, measured
from simulator.report.summary import SCHEMA_VERSION, summary

FORMAT: Final = "conductor-run"


class RunFileError(ValueError):
    """A file does not hold a run; the message names the file, the field and the remedy."""


@dataclass(frozen=True, slots=True)
class Run:
    """``configuration`` is shown as it is and must be JSON; runs are told apart by ``name``."""

    name: str
    configuration: Mapping[str, Any]
    simulated: Simulated | Measured
    objectives: Objectives
    bounds: Bounds | None = None


def run_document(run: Run) -> dict[str, Any]:
    """As `RunFile` describes it; JSON types only, equal for equal runs."""
    of = measured(run.simulated) if isinstance(run.simulated, Simulated) else run.simulated
    return {
        "format": FORMAT,
        "name": run.name,
        "configuration": dict(run.configuration),
        "objectives": asdict(run.objectives),
        "summary": summary(of, run.objectives, run.bounds),
        "curves": {
            "ttft": cumulative(of.ttft_s, of.requests - of.served),
            "tbt": cumulative(of.judged_tbt_s(run.objectives), of.requests - of.served),
            "ttft_over_time": rolling(of.arrival_s, of.ttft_s),
            "load_variation": load_variation_over_time(of),
            "heatmaps": heatmaps(of.timeline),
        },
    }


def write_run_file(path: Path, run: Run) -> None:
    path.write_bytes(orjson.dumps(run_document(run), option=orjson.OPT_APPEND_NEWLINE))


def read_run_file(path: Path) -> dict[str, Any]:
    """The document of a file. Raises RunFileError, and OSError."""
    from simulator.report.run_file import (
        RunFile,
    )  # its schema takes longer to build than a simulation to start

    try:
        document = orjson.loads(path.read_bytes())
    except orjson.JSONDecodeError as error:
        raise RunFileError(f"{path} is not JSON: {error}") from None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise RunFileError(f'{path} is not a run file: it lacks "format": "{FORMAT}"')
    found = document.get("summary")
    version = found.get("schema_version") if isinstance(found, dict) else None
    if version != SCHEMA_VERSION:
        raise RunFileError(
            f"{path}: summary.schema_version is {version}, and this version reads {SCHEMA_VERSION}: "
            "run it again to get a file of today"
        )
    try:
        RunFile.model_validate(document)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise RunFileError(f"{path}: {where}: {first['msg']}") from None
    return document
