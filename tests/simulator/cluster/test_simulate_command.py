"""`conductor simulate`, through the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from conductor.cli.simulate import simulate as command

app = typer.Typer()
app.command()(command)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    lines = [
        {
            "timestamp": 500 * number,
            "input_length": 1_600,
            "output_length": 20,
            "hash_ids": [0, 1, 2 + number % 3, 10 + number],
        }
        for number in range(30)
    ]
    path.write_text("\n".join(json.dumps(line) for line in lines))
    return path


def simulate(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(each) for each in arguments], env={"COLUMNS": "80"})


@pytest.mark.parametrize("cluster", ["2", "1p1d"])
def test_a_table_compares_policies(trace: Path, cluster: str) -> None:
    result = simulate(trace, "--cluster", cluster, "--policy", "slo,round_robin")
    assert result.exit_code == 0, result.output
    assert "30 requests" in result.stdout
    rows = [line.split() for line in result.stdout.splitlines()]
    assert {"slo", "round_robin"} <= {row[0] for row in rows if len(row) == 12}


def test_json_has_every_policy_and_request(trace: Path) -> None:
    arguments = ("--policy", "slo,lmetric", "--limit", "20", "--cache-blocks", "50", "--requests", "--json")
    result = simulate(trace, *arguments)
    assert result.exit_code == 0, result.output
    figures = json.loads(result.stdout)
    assert list(figures["policies"]) == ["slo", "lmetric"]
    assert figures["cache_blocks"] == 50
    for each in figures["policies"].values():
        assert each["request_count"] == len(each["requests"]) == 20
        assert each["time_to_first_token"]["unit"] == "ms"


def test_single_steps_give_the_same(trace: Path) -> None:
    fast, slow = (
        json.loads(simulate(trace, "--policy", "slo", "--json", *more).stdout)
        for more in ((), ("--step-by-step",))
    )
    assert fast == slow


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--cluster", "4p"), "neither a number of mixed instances"),
        (("--instance-class", "abacus"), "known: llama-3.1-8b-h100"),
        (("--policy", "slo,best"), "unknown policy 'best'; known: slo"),
        (("--policy", ","), "names none"),
        (("--requests",), "belongs to --json"),
    ],
)
def test_wrong_options_are_explained(trace: Path, arguments: tuple[str, ...], message: str) -> None:
    result = simulate(trace, *arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())


def test_a_broken_trace_is_explained(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    assert "No such file" in simulate(path).stderr
    path.write_text('{"timestamp": 1}')
    assert "'input_length' is missing" in " ".join(simulate(path).stderr.split())
    path.write_text("")
    assert "holds no requests" in " ".join(simulate(path).stderr.split())
