"""`conductor replay --decisions FILE`: recorded decisions, decided again."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from conductor import __version__
from conductor.cli.json_output import write_json
from conductor.decision_replay import DecisionReplay, PolicyReport, ReplayError, ReplayReport
from conductor.journal import Recording, RecordingError, open_recording
from conductor.policies import make_policy


def replay_decisions(path: Path, policy: str | None, json_path: str | None) -> None:
    """Exit code 0 when all decisions are equal, 1 at the first difference, 2 when the file cannot be used.

    With a policy, what it would have chosen at every decision.
    """
    console = Console(stderr=True)
    try:
        recording = open_recording(path)
        replay = DecisionReplay(recording)
        if policy is None:
            _checked(recording, replay.check(), json_path)
        else:
            _compared(recording, replay.compare(make_policy(policy)), json_path)
    except (RecordingError, ReplayError, ValueError) as error:
        console.print(f"conductor: {error}", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(2) from None


def _checked(recording: Recording, report: ReplayReport, json_path: str | None) -> None:
    difference = report.difference
    figures: dict[str, Any] = {
        "file": str(recording.path),
        "policy": recording.header.policy.name,
        "events": report.events,
        "decisions": report.decisions,
        "refusals": report.refusals,
        "equal": difference is None,
        "difference": None,
        "ended": _how_it_ends(recording) if difference is None else None,
    }
    if difference is not None:
        figures["difference"] = {
            "line": difference.line,
            "request_id": difference.request_id,
            "fields": difference.fields(),
        }
    if json_path is not None:
        write_json(json_path, figures)
    if json_path == "-":
        pass
    elif difference is None:
        _warn(recording)
        print(
            f"{report.decisions} decisions and {report.refusals} refusals of {recording.header.policy.name} "
            f"({report.events} events): all equal"
        )
    else:
        print(
            f"line {difference.line}: the decision for request {difference.request_id!r} differs, after "
            f"{report.decisions} equal ones"
        )
        for line in difference.fields():
            print(f"  {line}")
        if recording.header.written_by != __version__:
            print(f"  (recorded by version {recording.header.written_by}, this is {__version__})")
    raise typer.Exit(0 if difference is None else 1)


def _compared(recording: Recording, report: PolicyReport, json_path: str | None) -> None:
    choices = report.choices
    figures: dict[str, Any] = {
        "file": str(recording.path),
        "recorded_policy": recording.header.policy.name,
        "policy": report.policy,
        "decisions": len(choices),
        "equal_share": sum(c.equal for c in choices) / len(choices) if choices else None,
        "equal_prefill_share": (
            sum(c.prefill == c.recorded.prefill for c in choices) / len(choices) if choices else None
        ),
        "no_placement": sum(c.prefill is None for c in choices),
        "ttft_s": {
            "recorded": _quantiles([c.recorded.ttft_s for c in choices]),
            report.policy: _quantiles([c.ttft_s for c in choices if c.ttft_s is not None]),
        },
        "prefills": {
            "recorded": dict(Counter(c.recorded.prefill[0] for c in choices).most_common()),
            report.policy: dict(
                Counter(c.prefill[0] for c in choices if c.prefill is not None).most_common()
            ),
        },
    }
    if json_path is not None:
        write_json(json_path, figures)
    if json_path == "-":
        return
    _warn(recording)
    console = Console()
    table = Table("", "mean", "p50", "p90", "p99", title="predicted TTFT, ms")
    for name, quantiles in figures["ttft_s"].items():
        label = f"{recording.header.policy.name} (recorded)" if name == "recorded" else name
        table.add_row(label, *(f"{quantiles[q] * 1e3:,.1f}" for q in ("mean", "p50", "p90", "p99")))
    console.print(table)
    if choices:
        console.print(
            f"{report.policy} chooses the same at {figures['equal_share']:.1%} of {len(choices)} decisions "
            f"({figures['equal_prefill_share']:.1%} the same prefill rank). Each is asked in the state that the "
            "recorded decisions had led to.",
            highlight=False,
        )
    else:
        console.print("the recording has no decisions")


def _quantiles(values: list[float]) -> dict[str, float]:
    if not values:
        return dict.fromkeys(("mean", "p50", "p90", "p99"), float("nan"))
    p50, p90, p99 = np.quantile(values, [0.5, 0.9, 0.99]).tolist()
    return {"mean": float(np.mean(values)), "p50": p50, "p90": p90, "p99": p99}


def _how_it_ends(recording: Recording) -> str:
    if recording.truncated:
        return "the last line is cut off and was left out"
    if recording.end is None:
        return "the recording was not closed; its last events may be missing"
    dropped = recording.end.dropped
    return recording.end.end + (f"; {dropped} later events are not in it" if dropped else "")


def _warn(recording: Recording) -> None:
    how = _how_it_ends(recording)
    if how != "closed":
        print(f"note: {how}", file=sys.stderr)
