"""`conductor experiment` as a user calls it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner, Result

from conductor.cli.experiment import experiment as app
from simulator.experiments.experiment_file import shipped_experiments

CONTENT = {
    "title": "Two policies",
    "question": "Which is faster?",
    "source": "Paper, Figure 1",
    "workloads": {"calls": {"generate": "api", "requests": 30, "rate": 10}},
    "clusters": {"one": {"cluster": "1"}},
    "policies": ["slo", "random"],
    "report": ["mean_ttft_s", "reuse_percent"],
    "expected": [{"where": {"policy": "random"}, "figures": {"mean_ttft_s": 19.65}}],
}


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(each) for each in arguments], env={"COLUMNS": "200"})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(CONTENT))
    return path


def test_the_list_has_title_question_and_source() -> None:
    listed = run("list").stdout
    for shipped in shipped_experiments():
        content = yaml.safe_load(shipped.read_text())
        for each in (shipped.stem, content["title"], content["question"], content["source"].split()[0]):
            assert each in listed


def test_figures_of_the_source_stand_beside_ours(path: Path) -> None:
    result = run("run", path, "--jobs", 1)
    assert result.exit_code == 0, result.output
    assert "Which is faster?" in result.stdout and "Paper, Figure 1" in result.stdout
    rows = {row[0]: row for row in map(str.split, result.stdout.splitlines()) if row}
    assert rows["random"][2] == "19.650"
    assert rows["slo"][2] == "-"


def test_json_has_both(path: Path, tmp_path: Path) -> None:
    result = run(
        "run", path, "--jobs", 1, "--json", "-", "--only", "policy=random", "--out", tmp_path / "kept"
    )
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert (report["experiment"], report["source"]) == ("mine", "Paper, Figure 1")
    (point,) = report["points"]
    assert point["expected"] == {"mean_ttft_s": 19.65}
    assert point["figures"]["request_count"] == 30


def test_sizes_are_those_of_the_catalogue() -> None:
    result = run("run", "kv-sizes", "--json", "-")
    rows = json.loads(result.stdout)["sizes"]
    for row in rows:
        if row["expected_gib"] is not None:
            assert row["kv_bytes"] / 2**30 == pytest.approx(row["expected_gib"], rel=0.01)
    assert "320" in run("run", "kv-sizes").stdout


def test_a_wrong_label_is_explained(path: Path) -> None:
    result = run("run", path, "--only", "policy")
    assert result.exit_code == 2
    assert "must look like workload=chat,rag" in result.stderr
