"""The table of measured runs: what is read of it, what is left out, what is refused."""

import zipfile
from pathlib import Path

import pytest
from silicon_table import row, synthetic_runs, write_table

from conductor.catalogue import KvPrecision, WeightPrecision
from simulator.accuracy import FRAMEWORKS, Client, read_silicon
from simulator.accuracy.silicon import TABLE

RUNS = [run for framework in FRAMEWORKS for run in synthetic_runs(framework)]


def test_runs_are_read_as_they_were_measured(tmp_path: Path) -> None:
    silicon = read_silicon(write_table(tmp_path / "silicon.csv", map(row, RUNS)))
    assert silicon.rows == len(RUNS)
    assert silicon.left_out == {}
    for run, expected in zip(silicon.runs, RUNS, strict=True):
        assert run.ttft_s == pytest.approx(expected.ttft_s)
        assert run.tpot_s == pytest.approx(expected.tpot_s)
        for field in ("framework", "model", "gpu", "weights", "kv", "tensor_parallel", "users", "client"):
            assert getattr(run, field) == getattr(expected, field), field
        assert run.prompt_tokens == pytest.approx(expected.prompt_tokens)
        assert run.held_steps == expected.held_steps


def test_what_inferencemax_measured_has_shorter_prompts_and_smaller_kv_entries(tmp_path: Path) -> None:
    run = next(run for run in RUNS if run.client is Client.INFERENCEMAX)
    entry = {**row(run), "isl": "1000", "osl": "2000"}
    ours, theirs = read_silicon(
        write_table(tmp_path / "t.csv", [entry, {**entry, "silicon_data_source": "source_file=/a/b.csv"}])
    ).runs
    assert (ours.prompt_tokens, ours.output_tokens, ours.kv) == (900, 1800, KvPrecision.FP8)
    assert (theirs.prompt_tokens, theirs.output_tokens, theirs.kv) == (1000, 2000, KvPrecision.BF16)


def test_a_wheel_is_read_without_unpacking_it(tmp_path: Path) -> None:
    table = write_table(tmp_path / "silicon.csv", map(row, RUNS[:5]))
    wheel = tmp_path / "aiconfigurator_core-0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(table, TABLE)
    assert read_silicon(wheel) == read_silicon(table)


def test_what_cannot_be_predicted_is_counted_not_dropped(tmp_path: Path) -> None:
    entry = row(RUNS[0])
    rows = [
        entry,
        {**entry, "model_path": "deepseek-ai/DeepSeek-R1"},
        {**entry, "model_path": "openai/gpt-oss-120b"},
        {**entry, "precision": "int4"},
    ]
    silicon = read_silicon(write_table(tmp_path / "t.csv", rows))
    assert silicon.rows == 4
    assert len(silicon.runs) == 1
    assert sum(silicon.left_out.values()) == 3
    assert silicon.left_out["mixtures of experts and other models"] == 2


def test_a_disaggregated_run_is_its_decode_instance(tmp_path: Path) -> None:
    entry = {**row(RUNS[0]), "mode": "disagg", "batch_size": "", "tp_size": ""}
    entry |= {"decode_batch_size": "48", "decode_tp_size": "4", "precision": "fp4"}
    (run,) = read_silicon(write_table(tmp_path / "t.csv", [entry])).runs
    assert run.split
    assert (run.users, run.tensor_parallel, run.weights) == (48, 4, WeightPrecision.FP4)


@pytest.mark.parametrize(
    ("column", "value", "complaint"),
    [
        ("batch_size", "", "line 2: 'batch_size' is no number: ''"),
        ("silicon_tpot_ms", "fast", "line 2: 'silicon_tpot_ms' is no number: 'fast'"),
        ("silicon_ttft_ms", "0", "line 2: 'silicon_ttft_ms' must be positive, not '0'"),
        ("isl", "nan", "line 2: 'isl' must be positive"),
    ],
)
def test_broken_rows_are_named(column: str, value: str, complaint: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=complaint):
        read_silicon(write_table(tmp_path / "t.csv", [{**row(RUNS[0]), column: value}]))


def test_files_that_are_something_else(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot read .*absent"):
        read_silicon(tmp_path / "absent.csv")
    other = tmp_path / "other.csv"
    other.write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="no column 'silicon_data_source'"):
        read_silicon(other)
    not_zipped = tmp_path / "fake.whl"
    not_zipped.write_text("no zip")
    with pytest.raises(ValueError, match="no wheel of aiconfigurator-core"):
        read_silicon(not_zipped)
