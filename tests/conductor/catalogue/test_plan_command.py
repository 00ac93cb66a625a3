"""`conductor plan` as a user calls it: the survey's figures, and errors that say what to change."""

import json
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from conductor.catalogue import GPUS, MODELS
from conductor.cli import app

SURVEY = (
    *("--model", "deepseek-v4-pro", "--gpu", "b300", "--gpus", "1000", "--tensor-parallel", "1"),
    *("--weights-gb", "155", "--runtime-gb", "25", "--memory-utilisation", "1"),
    *("--kv", "bf16", "--kv", "fp8+fp4-indexer", "--uncompressed-gib", "170"),
    *("--price-per-month", "1170000", "--price-per-million", "0.87"),
)
K = 1024


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["plan", *arguments])


def figures(*arguments: str) -> Any:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_the_survey_s_thousand_gpus() -> None:
    found = figures(*SURVEY)
    assert found["kv_budget_bytes_per_gpu"] == pytest.approx(108e9)
    held = {
        (row["context_tokens"] // K, row["kv_precision"]): row["requests_per_instance"]
        for row in found["contexts"]
    }
    assert [held[32, name] for name in ("bf16", "fp8+fp4-indexer")] == [
        326,
        649,
    ]  # 333 and 666 from rounded sizes
    for context, bf16, mixed in ((128, 83, 165), (256, 41, 83), (512, 20, 41), (1024, 10, 20)):
        assert (held[context, "bf16"], held[context, "fp8+fp4-indexer"]) == (bf16, mixed)
    assert found["contexts"][-1]["requests_on_cluster"] == 20_000
    sizes = [measure["request_bytes"] / 2**30 for measure in found["savings"]["measures"]]
    assert sizes == pytest.approx([170, 9.62, 4.80, 0.72], rel=0.006)
    assert found["break_even"]["output_tokens_per_month"] == pytest.approx(1.34e12, rel=0.005)
    assert found["break_even"]["requests_per_day"] == pytest.approx(4.5e6, rel=0.005)


def test_a_request_larger_than_an_instance() -> None:
    arguments = ("--model", "glm-5.2-estimate", "--gpu", "b300", "--gpus", "1000", "--tensor-parallel", "1")
    memory = ("--weights-gb", "155", "--runtime-gb", "25", "--memory-utilisation", "1")
    [row] = figures(*arguments, *memory, "--kv", "bf16", "--context", str(1024 * K))["contexts"]
    assert (row["requests_per_instance"], row["instances_per_request"]) == (0, 4)
    assert row["requests_on_cluster"] == 250


def test_inflection_of_llama_70b() -> None:
    found = figures("--model", "llama-3-70b", "--gpu", "h100-80gb", "--kv", "fp8", "--kv", "bf16")
    inflection = {
        (row["context_tokens"] // K, row["kv_precision"]): row["inflection_requests"]
        for row in found["contexts"]
    }
    assert [inflection[context, "fp8"] for context in (8, 32, 128)] == [27, 7, 2]
    assert [inflection[context, "bf16"] for context in (8, 32, 128)] == [14, 4, 1]
    assert found["kv_bytes_per_token"] == {"fp8": 163_840, "bf16": 327_680}


def test_the_fewest_gpus_that_leave_room() -> None:
    small = figures("--model", "llama-3-70b", "--gpu", "h100-80gb", "--gpus", "64")
    assert (small["gpus_per_instance"], small["instances"], small["kv_copies"]) == (2, 32, 1)
    latent = figures("--model", "deepseek-v3", "--gpu", "h200")
    assert (latent["gpus_per_instance"], latent["instances"], latent["kv_copies"]) == (8, 1, 8)


def test_more_gpus_to_an_instance_hold_more_only_of_what_they_divide() -> None:
    def held(model: str, size: int, weights: str) -> int:
        arguments = (
            "--tensor-parallel",
            str(size),
            "--weights-gb",
            weights,
            "--kv",
            "bf16",
            "--context",
            "8192",
        )
        [row] = figures("--model", model, "--gpu", "h200", *arguments)["contexts"]
        return int(row["requests_per_instance"])

    assert held("llama-3-70b", 8, "20") >= 8 * held("llama-3-70b", 1, "20")
    assert held("deepseek-v3", 8, "20") == held("deepseek-v3", 1, "20")


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("gpu", GPUS)
def test_every_model_and_gpu_can_be_planned_or_is_refused_with_a_remedy(model: str, gpu: str) -> None:
    result = run("--model", model, "--gpu", gpu)
    assert result.exit_code == 0, result.output
    assert "requests at once" in result.stdout
    assert f"{model}:" in result.stdout


def test_tables_say_the_same() -> None:
    printed = run(*SURVEY).stdout
    for expected in ("326 / 326,000", "20 / 20,000", "9.62", "235", "108.0 GB", "1,344,827,586,207"):
        assert expected in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--model", "gpt-9"), "known: llama-3.1-8b"),
        (("--gpu", "abacus"), "known: a100-80gb"),
        (("--price-per-month", "5"), "needs both --price-per-month and --price-per-million"),
        (
            ("--model", "deepseek-v3", "--gpus", "2"),
            "deepseek-v3 in fp8 needs 8 x h200 an instance, --gpus is 2",
        ),
        (("--weights", "bf16", "--gpu", "l40s", "--tensor-parallel", "1"), "give more --tensor-parallel"),
    ],
)
def test_errors_are_one_line_and_exit_code_2(arguments: tuple[str, ...], message: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stdout == ""
