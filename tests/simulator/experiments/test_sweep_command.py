"""`conductor sweep` as a user calls it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import typer
from simulated_points import small_trace
from typer.testing import CliRunner, Result

from conductor.cli.sweep import sweep as command
from conductor.configuration_faults import ConfigError

app = typer.Typer()
app.command()(command)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return small_trace(tmp_path)


def sweep(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(each) for each in arguments], env={"COLUMNS": "120"})


def report(*arguments: object) -> list[dict[str, Any]]:
    result = sweep(*arguments, "--jobs", 1, "--json", "-")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)["points"]


def test_every_combination_is_simulated_in_order(trace: Path) -> None:
    points = report(
        trace, "--cluster", "1,1p1d", "--policies", "slo,lmetric", "--rates", "5,20", "--limit", 20
    )
    labels = [tuple(point["labels"].values())[1:] for point in points]
    assert labels == [
        (cluster, policy, load)
        for cluster in ("1", "1p1d")
        for policy in ("slo", "lmetric")
        for load in ("5/s", "20/s")
    ]
    assert {point["figures"]["request_count"] for point in points} == {20}
    assert len({point["digest"] for point in points}) == 8


def test_ratios_and_settings_multiply(trace: Path) -> None:
    points = report(
        *(trace, "--ratios", "1p2d,2p1d", "--limit", 10, "--set", "instances.*.kv_tokens=50k,100k"),
        *("--set", "scheduling.policy_parameters={decode_prefill_tokens: 0}"),
    )
    found = [(p["labels"]["cluster"], p["labels"]["instances.*.kv_tokens"]) for p in points]
    assert found == [("1p2d", "50k"), ("1p2d", "100k"), ("2p1d", "50k"), ("2p1d", "100k")]


def test_clusters_of_files_are_split_too(trace: Path, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        "instances: [{role: prefill, count: 1}, {role: decode, count: 1}]\nscheduling: {policy: random}"
    )
    points = report(trace, "--cluster", path, "--ratios", "1p1d,2p1d", "--limit", 10)
    assert [p["labels"]["cluster"] for p in points] == ["mine 1p1d", "mine 2p1d"]
    assert {p["labels"]["policy"] for p in points} == {"random"}


def test_a_table_shows_what_differs(trace: Path, tmp_path: Path) -> None:
    result = sweep(trace, "--cluster", "1", "--speeds", "1,2", "--jobs", 1, "--out", tmp_path / "kept")
    assert result.exit_code == 0, result.output
    rows = [line.split() for line in result.stdout.splitlines()]
    assert [row[0] for row in rows if len(row) == 8 and row[0].startswith("x")] == ["x1", "x2"]
    assert "cluster" not in result.stdout
    assert len(list((tmp_path / "kept").iterdir())) == 2


def test_bounds_are_shown_where_asked_for(trace: Path) -> None:
    points = report(trace, "--cluster", "1", "--bounds", "--limit", 20)
    assert points[0]["figures"]["gaps"]["mean_time_to_first_token_ratio"] >= 1.0
    assert "bound" in sweep(trace, "--cluster", "1", "--bounds", "--limit", 20, "--jobs", 1).stdout


def test_a_page_has_every_simulation(trace: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    points = report(trace, "--cluster", "1", "--rates", "5,20", "--limit", 20, "--html", page)
    assert all("curves" not in point["figures"] for point in points)
    assert all(f"1 slo {rate}/s" in page.read_text() for rate in (5, 20))


def test_the_highest_rate_is_found(trace: Path) -> None:
    strict, lax = (
        report(trace, "--cluster", "1", "--find-rate", "--good-share", share)[0] for share in (0.99, 0.5)
    )
    assert strict["labels"]["load"] == "highest rate"
    assert strict["figures"]["good_request_fraction"] >= 0.99
    assert strict["figures"]["highest_rate"] < lax["figures"]["highest_rate"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "say which clusters"),
        (("--cluster", "2", "--policies", "slo,best"), "unknown policy 'best'"),
        (("--cluster", "2", "--speeds", "fast"), "are numbers such as 1,2,4"),
        (("--cluster", "2", "--speeds", "0"), "speed must be positive"),
        (("--cluster", "2", "--rates", ","), "there is none"),
        (("--cluster", "2", "--rates", "1", "--find-rate"), "exclude each other"),
        (("--cluster", "2", "--good-share", "0.5"), "--good-share belongs to --find-rate"),
        (("--cluster", "2", "--set", "x"), "must look like"),
        (("--cluster", "2", "--set", "instances.*.kv_tokens=100"), "not hold a block of 512"),
    ],
)
def test_wrong_options_are_explained(trace: Path, arguments: tuple[str, ...], message: str) -> None:
    result = sweep(trace, *arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())


def test_wrong_clusters_are_explained(trace: Path) -> None:
    result = sweep(trace, "--cluster", "8", "--ratios", "1p1d")
    assert isinstance(result.exception, ConfigError)
    assert "ratio 1p1d needs one group of instances for each of its roles" in str(result.exception)


def start_long_sweep(folder: Path, jobs: str) -> subprocess.Popen[str]:
    """It runs, and has one result in ``folder/kept``."""
    trace, kept = small_trace(folder, requests=1_500), folder / "kept"
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "conductor.cli", "sweep", str(trace), "--cluster", "4"),
            *("--rates", ",".join(str(rate) for rate in range(20, 60)), "--out", str(kept), "--jobs", jobs),
        ],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    deadline_s = time.monotonic() + 60
    while not (kept.is_dir() and any(kept.glob("*.json"))):
        assert process.poll() is None and time.monotonic() < deadline_s
        time.sleep(0.05)
    return process


@pytest.mark.extended
@pytest.mark.slow
def test_processes_end_with_the_one_that_started_them(tmp_path: Path) -> None:
    process = start_long_sweep(tmp_path, "2")
    process.kill()
    process.communicate(timeout=30)  # until nobody holds its pipes


@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.parametrize("jobs", ["1", "2"])
def test_an_interrupt_ends_it_with_a_message(tmp_path: Path, jobs: str) -> None:
    kept = tmp_path / "kept"
    process = start_long_sweep(tmp_path, jobs)
    try:
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to all of them
        output, errors = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 130
    assert f"interrupted: what has ended is in {kept}" in " ".join(errors.split())
    assert "Traceback" not in errors and not output
    assert not list(kept.glob("*.partial"))
