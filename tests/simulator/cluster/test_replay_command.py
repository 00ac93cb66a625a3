"""`conductor replay` in virtual time, through the command line."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from conductor.cli.live_replay import RequestResult
from conductor.cli.live_run import unless_interrupted
from conductor.cli.replay import replay as command
from conductor.configuration_faults import ConfigError
from simulator.workloads import generate, mooncake_line

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


def replay(*arguments: str | Path, stdin: bytes | None = None) -> Result:
    return CliRunner().invoke(app, [str(each) for each in arguments], env={"COLUMNS": "80"}, input=stdin)


def report(*arguments: str | Path, stdin: bytes | None = None) -> dict[str, object]:
    result = replay(*arguments, "--json", "-", stdin=stdin)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.mark.parametrize("cluster", ["2", "1p1d"])
def test_a_table_compares_policies(trace: Path, cluster: str) -> None:
    result = replay(trace, "--cluster", cluster, "--policy", "slo,round_robin")
    assert result.exit_code == 0, result.output
    assert "30 requests" in result.stdout
    rows = [line.split() for line in result.stdout.splitlines()]
    assert {"slo", "round_robin"} <= {row[0] for row in rows if len(row) == 12}


def test_a_table_says_its_units_and_why_requests_were_not_served(trace: Path) -> None:
    shown = replay(trace, "--cluster", "2", "--policy", "slo,random").stdout
    assert "TTFT and TBT in ms" in shown and "not served by" not in shown
    small = ("--set", "instances.*.kv_tokens=1536", "--no-bounds")
    shown = replay(trace, "--cluster", "2", "--policy", "slo,random", *small).stdout
    for policy in ("slo", "random"):
        assert f"not served by {policy}: 30 too long for every instance" in shown


def test_json_has_every_policy_and_request(trace: Path) -> None:
    figures = report(
        *(trace, "--cluster", "8", "--policy", "slo,lmetric", "--limit", "20", "--requests"),
        *("--set", "instances.*.kv_tokens=25600"),
    )
    assert list(figures["policies"]) == ["slo", "lmetric"]
    assert {instance["kv_tokens"] for instance in figures["instances"]} == {25_600}
    for each in figures["policies"].values():
        assert each["request_count"] == len(each["requests"]) == 20
        assert each["time_to_first_token"]["unit"] == "ms"


def test_json_goes_to_a_file_beside_the_table(trace: Path, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    result = replay(trace, "--cluster", "2", "--json", path)
    assert "good" in result.stdout
    assert json.loads(path.read_text()) == report(trace, "--cluster", "2")


@pytest.mark.parametrize(("file", "says"), [("none/report.json", "folder"), (".", "name a file")])
def test_a_report_that_could_not_be_written_is_told_first(
    trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    result = replay(trace, "--cluster", "2", "--json", file)
    assert result.exit_code == 2 and says in result.output and "good" not in result.output


def test_requests_over_http_may_be_interrupted_twice() -> None:
    async def work() -> list[RequestResult]:
        try:
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(30)
        finally:  # thousands of requests take a while to be dropped
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(0.05)
        return []

    assert asyncio.run(unless_interrupted(work())) is None


def test_what_no_scheduler_can_exceed_stands_beside(trace: Path) -> None:
    figures = report(trace, "--cluster", "2")["policies"]["slo"]
    assert figures["gaps"]["mean_time_to_first_token_ratio"] >= 1.0
    rows = [line.split() for line in replay(trace, "--cluster", "2").stdout.splitlines()]
    (bound,) = (row[1:] for row in rows if row[:1] == ["bound"])
    assert bound[0] == f"{figures['bounds']['mean_time_to_first_token']:,.0f}"
    assert bound[1:] == ["100.0", f"{figures['bounds']['prefix_cache_reused_ratio_capacity']:.1%}"[:-1]]
    assert report(trace, "--cluster", "2", "--no-bounds")["policies"]["slo"]["bounds"] is None
    assert "exceed" not in replay(trace, "--cluster", "2", "--no-bounds").stdout


def test_single_steps_give_the_same(trace: Path) -> None:
    fast, slow = (report(trace, "--cluster", "2", *more) for more in ((), ("--step-by-step",)))
    assert fast == slow


def test_the_policy_is_the_cluster_files_unless_named(trace: Path, tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("instances: [{count: 2}]\nscheduling: {policy: dynamo, objectives: {ttft_s: 0.001}}")
    figures = report(trace, "--cluster", path)
    assert list(figures["policies"]) == ["dynamo"]
    assert figures["policies"]["dynamo"]["ttft_fraction"] == 0.0
    figures = report(trace, "--cluster", path, "--policy", "slo", "--ttft-objective-s", "9")
    assert list(figures["policies"]) == ["slo"]
    assert figures["policies"]["slo"]["ttft_fraction"] == 1.0


def test_a_trace_may_come_from_stdin() -> None:
    lines = b"".join(map(mooncake_line, generate("api", 40, 20.0, seed=3)))
    figures = report("-", "--cluster", "h100-8", stdin=lines)
    assert figures["policies"]["slo"]["request_count"] == 40


def test_blocks_of_16_tokens_are_reused_as_such(tmp_path: Path) -> None:
    path = tmp_path / "bailian.jsonl"
    lines = [
        {
            "chat_id": number,
            "parent_chat_id": number - 1,
            "timestamp": 5.0 * number,
            "input_length": 160 + 16 * number,
            "output_length": 4,
            "type": "text",
            "turn": number + 1,
            "hash_ids": list(range(10 + number)),
        }
        for number in range(10)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    figures = report(path, "--cluster", "1")
    assert figures["block_tokens"] == 16
    # All but the first reuse everything except what they add.
    assert figures["policies"]["slo"]["total_usage_prompt_cache_read_tokens"] == sum(
        160 + 16 * number for number in range(9)
    )


def test_loads_and_admission_change_what_happens(tmp_path: Path) -> None:
    path = tmp_path / "api.jsonl"
    path.write_bytes(b"".join(map(mooncake_line, generate("api", 150, 1.0, seed=3))))
    calm = report(path, "--cluster", "1")["policies"]["slo"]
    busy = report(path, "--cluster", "1", "--rate", "100")["policies"]["slo"]
    assert busy["time_to_first_token"]["avg"] > 3 * calm["time_to_first_token"]["avg"]
    assert busy["outcomes"]["rejected"] == 0
    early = report(path, "--cluster", "1", "--rate", "100", "--admission", "early")["policies"]["slo"]
    assert early["outcomes"]["rejected"] > 0
    held = report(path, "--cluster", "1", "--rate", "100", "--hold", "5")["policies"]["slo"]
    assert held["outcomes"]["rejected"] > 0, "the waiting room is small"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "conductor replay TRACE --url http://127.0.0.1:8000"),
        (("--cluster", "2", "--url", "http://x"), "--cluster and --url exclude each other"),
        (("--cluster", "2", "--policy", "slo,best"), "unknown policy 'best'; known: slo"),
        (("--cluster", "2", "--policy", ","), "names none"),
        (("--cluster", "2", "--requests"), "belongs to --json"),
        (("--cluster", "2", "--speed", "2", "--rate", "2"), "give one of them"),
        (("--cluster", "2", "--timeout-s", "5"), "--timeout-s belongs to --url"),
        (("--cluster", "2", "--set", "policy"), "must look like"),
        (("--cluster", "2", "--set", "instances.*.kv_tokens=100"), "not hold a block of 512"),
        (("--cluster", "2", "--min-input-tokens", "9999"), "loosen the filters"),
        (("--url", "http://127.0.0.1:1", "--hold", "3"), "--hold belongs to --cluster"),
        (("--url", "http://127.0.0.1:1", "--policy", "slo"), "the front door decides"),
        (("--url", "http://127.0.0.1:1"), "is `conductor serve` running there?"),
    ],
)
def test_wrong_options_are_explained(trace: Path, arguments: tuple[str, ...], message: str) -> None:
    result = replay(trace, *arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--cluster", "4p"), "neither a number of mixed instances"),
        (("--cluster", "2", "--instance-class", "llama-3.1-8b-h10"), "did you mean 'llama-3.1-8b-h100'"),
        (("--cluster", "h100-8", "--instance-class", "llama-3.1-8b-h100"), "leave the instance class out"),
        (("--cluster", "nowhere.yaml"), "cannot read the cluster file nowhere.yaml"),
        (("--cluster", "2", "--admission", "strict"), "unknown admission rule 'strict'; known: accept_all"),
        (("--cluster", "2", "--set", "instances.1.kv_tokens=1M"), "there is a list of 1 at '1'"),
    ],
)
def test_clusters_that_cannot_be_are_explained(trace: Path, arguments: tuple[str, ...], message: str) -> None:
    result = replay(trace, *arguments)
    assert isinstance(result.exception, ConfigError)
    assert message in str(result.exception)


def test_a_broken_trace_is_explained(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    assert "No such file" in replay(path, "--cluster", "2").stderr
    path.write_text('{"timestamp": 1}\n')
    assert "'input_length' is missing" in " ".join(replay(path, "--cluster", "2").stderr.split())
    path.write_text("")
    assert "is empty" in " ".join(replay(path, "--cluster", "2").stderr.split())
