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

LOADED = {
    "workloads": {"calls": {"generate": "rag", "requests": 60, "rate": 12}},
    "clusters": {"one": {"cluster": "2"}},
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


def test_the_order_of_the_source_is_checked(path: Path, tmp_path: Path) -> None:
    order = {"figure": "mean_ttft_s", "label": "policy", "ascending": ["random", "slo"]}
    kept = ("--jobs", 1, "--out", tmp_path / "kept")
    for ascending, verdict in (
        (["random", "slo"], "NOT as expected"),
        (["slo", "random"], "as expected: slo"),
    ):
        path.write_text(yaml.safe_dump(CONTENT | LOADED | {"orders": [order | {"ascending": ascending}]}))
        result = run("run", path, *kept)
        assert result.exit_code == 0, result.output
        assert f"(calls, one, x1): {verdict}" in result.stdout
    (checked,) = json.loads(run("run", path, *kept, "--json", "-").stdout)["orders"]
    assert checked["holds"] and list(checked["ours"]) == ["slo", "random"]


def test_one_figure_across_a_label(path: Path) -> None:
    result = run("run", path, "--jobs", 1, "--across", "policy", "--figure", "requests", "--limit", 20)
    rows = [line.split() for line in result.stdout.splitlines()]
    assert ["slo", "random"] in rows and ["20", "20"] in rows, result.output
    for arguments, message in (
        (("--across", "polcy"), "points have no label 'polcy'; did you mean 'policy'"),
        (("--across", "policy", "--figure", "ttft"), "unknown figure 'ttft'"),
        (("--figure", "requests"), "say which labels are across"),
    ):
        wrong = run("run", path, *arguments)
        assert wrong.exit_code == 2 and message in wrong.stderr


def test_hit_rates_of_caches(tmp_path: Path) -> None:
    content = {name: CONTENT[name] for name in ("title", "question", "source", "workloads")}
    cache = {"workload": "calls", "capacity_tokens": 10_000_000, "expected_percent": 43.2}
    path = tmp_path / "caches.yaml"
    path.write_text(yaml.safe_dump(content | {"caches": [cache]}))
    (row,) = json.loads(run("run", path, "--json", "-").stdout)["caches"]
    assert row["expected_percent"] == 43.2 and 0 < row["found"]["lru_hit_rate"] < 1
    assert "43.2" in run("run", path).stdout


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
