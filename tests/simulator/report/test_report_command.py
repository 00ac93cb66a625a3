"""`conductor report` and the files of `conductor replay --save`, through the command line."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import typer
from simulated_runs import busy_pairs
from typer.testing import CliRunner, Result

from conductor.cli.replay import replay
from conductor.cli.report import report
from conductor.placement import Objectives
from simulator.report import Run, write_run_file


def invoke(command: object, *arguments: str | Path, columns: int = 80) -> Result:
    app = typer.Typer()
    app.command()(command)  # type: ignore[type-var]
    return CliRunner().invoke(app, [str(each) for each in arguments], env={"COLUMNS": str(columns)})


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / f"{seed}.json" for seed in range(5)]
    for seed, path in enumerate(paths):
        write_run_file(path, Run(f"policy-{seed}", {"seed": seed}, busy_pairs(60, seed), Objectives()))
    return paths


def test_runs_are_compared_here_and_on_a_page(files: list[Path], tmp_path: Path) -> None:
    page = tmp_path / "out.html"
    result = invoke(report, *files[:2], "--html", page, "--title", "Two seeds")
    assert result.exit_code == 0, result.output
    lines = [line.split() for line in result.stdout.splitlines()]
    assert ["policy-0", "policy-1"] in lines
    assert any(line[:2] == ["good", "requests"] for line in lines)
    assert "*" in result.stdout
    assert "<title>Two seeds</title>" in page.read_text()
    assert "out.html" in result.stderr.replace("\n", "")


def test_more_runs_than_fit_are_rows(files: list[Path]) -> None:
    result = invoke(report, *files)
    assert result.exit_code == 0, result.output
    rows = {line.split()[0]: line.split() for line in result.stdout.splitlines() if line.strip()}
    assert {f"policy-{seed}" for seed in range(5)} <= rows.keys()
    assert invoke(report, *files, columns=120).stdout.count("Time to first token") == 1


def test_a_folder_stands_for_its_run_files(files: list[Path], tmp_path: Path) -> None:
    with gzip.open(tmp_path / "0.trace.json.gz", "wb") as beside:
        beside.write(b"{}")
    whole = invoke(report, tmp_path, columns=120)
    assert whole.exit_code == 0, whole.output
    assert whole.stdout == invoke(report, *sorted(tmp_path.iterdir()), columns=120).stdout
    assert whole.stdout == invoke(report, *files, columns=120).stdout
    (tmp_path / "none").mkdir()
    nothing = invoke(report, tmp_path / "none")
    assert (nothing.exit_code, "there is no run file in" in nothing.stderr) == (2, True)


def test_mistakes_are_explained(files: list[Path], tmp_path: Path) -> None:
    result = invoke(report, tmp_path / "none.json")
    assert (result.exit_code, "No such file" in " ".join(result.stderr.split())) == (2, True)
    other = tmp_path / "other.json"
    other.write_text("{}")
    result = invoke(report, files[0], other)
    assert (result.exit_code, "not a run file" in " ".join(result.stderr.split())) == (2, True)
    result = invoke(report, files[0], "--html", tmp_path / "no" / "out.html")
    assert (result.exit_code, "cannot write" in result.stderr) == (2, True)


def test_simulated_runs_are_kept_for_reports(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 300 * n, "input_length": 1_600, "output_length": 20, "hash_ids": [0, 1, 2, 10 + n]}
        for n in range(30)
    ]
    trace.write_text("\n".join(json.dumps(line) for line in lines))
    kept, page = tmp_path / "kept", tmp_path / "page.html"
    result = invoke(
        *(replay, trace, "--cluster", "1p1d", "--policy", "slo,round_robin", "--save", kept, "--html", page)
    )
    assert result.exit_code == 0, result.output
    assert sorted(path.name for path in kept.iterdir()) == [
        *("round_robin.json", "round_robin.trace.json.gz", "slo.json", "slo.trace.json.gz")
    ]
    assert json.loads(gzip.decompress((kept / "slo.trace.json.gz").read_bytes()))["traceEvents"]
    assert "<title>" in page.read_text()
    compared = invoke(report, kept / "slo.json", kept / "round_robin.json")
    assert compared.exit_code == 0, compared.output
    with_gaps = json.loads((kept / "slo.json").read_text())["summary"]["gaps"]
    assert with_gaps["mean_time_to_first_token_ratio"] >= 1.0
    single = ("--cluster", "1", "--perfetto", tmp_path / "one.json")
    assert invoke(replay, trace, *single).exit_code == 0
    assert json.loads((tmp_path / "one.json").read_text())["traceEvents"]
    several = invoke(replay, trace, *single, "--policy", "slo,random")
    assert (several.exit_code, "--perfetto is of one policy" in several.stderr) == (2, True)
    in_it = ("--html", tmp_path / "new" / "page.html", "--save", tmp_path / "new")
    assert invoke(replay, trace, "--cluster", "1", *in_it).exit_code == 0
    assert (tmp_path / "new" / "page.html").is_file()


@pytest.mark.parametrize(
    ("option", "says"),
    [("--save", "cannot make the folder"), ("--html", "cannot write"), ("--perfetto", "cannot write")],
)
def test_what_cannot_be_written_is_told_before_the_work(tmp_path: Path, option: str, says: str) -> None:
    (tmp_path / "file").write_text("")
    path = tmp_path / "file" if option == "--save" else tmp_path / "none" / "out"
    result = invoke(replay, tmp_path / "no-trace.jsonl", "--cluster", "1", option, path)
    assert (result.exit_code, says in " ".join(result.stderr.split())) == (2, True), result.stderr
