"""`conductor trace` as a user calls it."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from conductor.cli import app
from simulator.workloads import generate, read_mooncake, trace_span_s

REAL_TRACES = Path(__file__).parents[4] / "shared" / "traces"
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
    f"2023-11-16 18:15:{second:02}.5,{600 + second},{second}\n" for second in range(20)
)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["trace", *map(str, arguments)])


@pytest.fixture
def azure(tmp_path: Path) -> Path:
    path = tmp_path / "azure.csv"
    path.write_text(AZURE)
    return path


def generated(folder: Path, *arguments: object) -> Path:
    result = run("generate", *arguments)
    assert result.exit_code == 0, result.output
    path = folder / "generated.jsonl"
    path.write_bytes(result.stdout_bytes)
    return path


def test_generated_traces_are_those_of_the_library(tmp_path: Path) -> None:
    path = generated(tmp_path, "rag", "--requests", 300, "--rate", 4, "--seed", 9)
    assert list(read_mooncake(path)) == generate("rag", 300, 4.0, 9)
    first = json.loads(path.read_text().splitlines()[0])
    assert first.keys() == {"timestamp", "input_length", "output_length", "hash_ids", "session_id"}


def test_a_rate_that_sessions_are_too_long_for_is_said(tmp_path: Path) -> None:
    result = run("generate", "chat", "--requests", 50, "--rate", 5)
    assert result.exit_code == 0
    assert "the longest session lasts" in result.stderr
    assert run("generate", "api", "--requests", 50, "--rate", 5).stderr == ""


def test_a_trace_comes_through_a_pipe(tmp_path: Path) -> None:
    path = generated(tmp_path, "api", "--requests", 40)
    for command in ("stats", "convert"):
        piped = CliRunner().invoke(app, ["trace", command, "-"], input=path.read_bytes())
        assert piped.exit_code == 0, piped.output
    assert piped.stdout_bytes.count(b"\n") == 40
    empty = CliRunner().invoke(app, ["trace", "stats", "-"], input=b"")
    assert (empty.exit_code, "stdin is empty" in empty.stderr) == (2, True)


@pytest.mark.parametrize("option", ["--rate", "--speed"])
def test_times_are_scaled_by_finite_numbers(tmp_path: Path, option: str) -> None:
    path = generated(tmp_path, "api", "--requests", 40)
    assert "less than or equal to 1000000" in run("convert", path, option, "inf").stderr
    assert "less than or equal to 1000000" in run("generate", "api", "--rate", "inf").stderr


def test_statistics_in_json(tmp_path: Path) -> None:
    path = generated(tmp_path, "coding", "--requests", 400, "--rate", 1)
    result = run("stats", path, "--json", "--capacity", 2000, "--capacity", 500)
    assert result.exit_code == 0, result.output
    figures = json.loads(result.stdout)
    assert (figures["format"], figures["requests"], figures["block_tokens"]) == ("mooncake", 400, 512)
    assert 0.85 <= figures["unlimited"]["token_hit_rate"] <= 0.95
    assert [row["capacity_blocks"] for row in figures["by_capacity"]] == [500, 2000]
    assert figures["by_capacity"][0]["lru_hit_rate"] < figures["by_capacity"][0]["belady_hit_rate"]
    assert figures["arrivals"]["sessions"] > 10


def test_statistics_as_tables(tmp_path: Path, azure: Path) -> None:
    path = generated(tmp_path, "api", "--requests", 200)
    printed = run("stats", path).stdout
    for expected in ("200 requests, mooncake", "Belady", "Poisson 1", "input"):
        assert expected in printed
    printed = run("stats", azure).stdout
    assert "20 requests, azure" in printed
    assert "does not say what requests share" in printed


def test_converting_filters_and_scales(tmp_path: Path, azure: Path) -> None:
    result = run("convert", azure, "--from-s", 5, "--to-s", 15, "--min-output-tokens", 8, "--speed", 2)
    assert result.exit_code == 0, result.output
    path = tmp_path / "part.jsonl"
    path.write_bytes(result.stdout_bytes)
    records = list(read_mooncake(path))
    assert [record.output_tokens for record in records] == list(range(8, 15))
    assert (records[0].arrival_s, records[0].input_tokens) == (1.5, 608)
    assert trace_span_s(records) == 3.0


def test_converting_merges_small_blocks(tmp_path: Path) -> None:
    path = tmp_path / "chats.json"
    path.write_text(json.dumps([{"input": "word " * 1000 + end, "output_length": 5} for end in ("x", "y")]))
    result = run("convert", path, "--rate", 2)
    assert result.exit_code == 0, result.output
    first, second = (json.loads(line) for line in result.stdout.splitlines())
    assert len(first["hash_ids"]) == 3
    assert first["hash_ids"][:2] == second["hash_ids"][:2]
    assert first["hash_ids"][2] != second["hash_ids"][2]
    assert first["timestamp"] == 0 < second["timestamp"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("stats", "absent.jsonl"), "absent.jsonl"),
        (("generate", "poem"), "known: chat, coding"),
        (("stats", "AZURE", "--limit", "3", "--min-input-tokens", "9999"), "loosen the filters"),
        (("stats", "AZURE", "--speed", "2", "--rate", "2"), "give one of them"),
        (("stats", "AZURE", "--format", "bailian"), "line 1: not valid JSON"),
    ],
)
def test_errors_are_one_line_and_exit_code_2(azure: Path, arguments: tuple[str, ...], message: str) -> None:
    result = run(*(str(azure) if each == "AZURE" else each for each in arguments))
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stdout == ""


def test_a_trace_that_was_cut_off_is_read_with_a_warning(tmp_path: Path) -> None:
    path = generated(tmp_path, "api", "--requests", 10)
    path.write_bytes(path.read_bytes()[:-30])
    result = run("stats", path, "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["requests"] == 9
    assert "line 10" in result.stderr


@pytest.mark.skipif(not REAL_TRACES.is_dir(), reason="the traces are not here")
def test_a_published_trace() -> None:
    result = run("stats", REAL_TRACES / "conversation_trace.jsonl", "--json", "--capacity", 5860)
    [row] = json.loads(result.stdout)["by_capacity"]
    assert (round(row["lru_hit_rate"], 3), round(row["belady_hit_rate"], 3)) == (0.136, 0.353)
