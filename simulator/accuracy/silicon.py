"""Real runs of serving engines: the table ``systems/silicon_sample.csv`` of the package aiconfigurator-core.

A row is a closed loop: model, GPU, engine, parallelism, lengths, users, and the mean time to first token and per
output token that were measured. The table is Apache-2.0 and NVIDIA's; it is read where it lies, never copied.
"""

from __future__ import annotations

import csv
import io
import zipfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Final

from conductor.catalogue import GPUS, MODELS, GpuSpec, KvPrecision, ModelSpec, WeightPrecision

TABLE: Final = "aiconfigurator_core/systems/silicon_sample.csv"
FRAMEWORKS: Final = ("sglang", "trtllm", "vllm")

_MODELS: Final = {
    "meta-llama/Llama-3.1-70B": "llama-3-70b",
    "meta-llama/Llama-3.1-8B-Instruct": "llama-3.1-8b",
    "nvidia/Llama-3.1-8B-Instruct-FP8": "llama-3.1-8b",
    "Qwen/Qwen3-32B": "qwen3-32b",
    "nvidia/Qwen3-32B-NVFP4": "qwen3-32b",
}
_GPUS: Final = {"h100_sxm": "h100-80gb", "h200_sxm": "h200", "b200_sxm": "b200", "gb200": "gb200"}
# An empty precision is the checkpoint's own, BF16 for every dense model that has one.
_PRECISIONS: Final = {
    "": WeightPrecision.BF16,
    "bf16": WeightPrecision.BF16,
    "fp8": WeightPrecision.FP8,
    "fp4": WeightPrecision.FP4,
}
_COLUMNS: Final = (
    "silicon_data_source",
    "backend",
    "model_path",
    "system",
    "precision",
    "mode",
    "isl",
    "osl",
    "batch_size",
    "tp_size",
    "decode_batch_size",
    "decode_tp_size",
    "silicon_ttft_ms",
    "silicon_tpot_ms",
)
# InferenceMAX (its README and scripts): lengths drawn evenly from 80 to 100 % of those named, FP8 KV cache, and
# TensorRT-LLM holding prompts back for 20 iterations (batch_wait_timeout_iters) at 1k/1k on fewer than 8 GPUs.
_MEAN_LENGTH: Final = 0.9
_HELD_STEPS: Final = 20


class Client(Enum):
    """What sent the requests and took the times."""

    INFERENCEMAX = "inferencemax"  # its bench_serving: ten requests a user, all users at once at the start
    OTHER = "other"  # NVIDIA's own runs, whose settings the table does not tell


@dataclass(frozen=True, slots=True)
class Run:
    """One measured closed loop of a dense model; lengths are means, in tokens."""

    framework: str
    model: ModelSpec
    gpu: GpuSpec
    weights: WeightPrecision
    kv: KvPrecision
    tensor_parallel: int
    users: int
    prompt_tokens: float
    output_tokens: float
    held_steps: int
    client: Client
    split: bool  # prefill and decode on instances of their own: users and GPUs are those of a decode instance
    ttft_s: float
    tpot_s: float


@dataclass(frozen=True, slots=True)
class Silicon:
    """The dense runs of a table, and how many rows there were of what was left out."""

    rows: int
    runs: tuple[Run, ...]
    left_out: Mapping[str, int]


def read_silicon(path: Path) -> Silicon:
    """Read the table ``path``, or the one in the wheel ``path``.

    Raises ValueError naming the file, the row and the column.
    """
    runs: list[Run] = []
    left_out: Counter[str] = Counter()
    with _open(path) as lines:
        table = csv.DictReader(lines)
        missing = [column for column in _COLUMNS if column not in (table.fieldnames or ())]
        if missing:
            raise ValueError(f"{path}: no column {missing[0]!r}; is this {TABLE}?")
        for row in table:
            reason = _reason_against(row)
            if reason is not None:
                left_out[reason] += 1
                continue
            try:
                runs.append(_run(row))
            except ValueError as error:
                raise ValueError(f"{path}, line {table.line_num}: {error}") from None
    return Silicon(len(runs) + left_out.total(), tuple(runs), dict(left_out))


def _open(path: Path) -> io.TextIOBase:
    try:
        if path.suffix != ".whl":
            return path.open(newline="")
        with zipfile.ZipFile(path) as wheel:
            return io.StringIO(wheel.read(TABLE).decode(), newline="")
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    except (zipfile.BadZipFile, KeyError):
        raise ValueError(f"{path} is no wheel of aiconfigurator-core: it lacks {TABLE}") from None


def _reason_against(row: Mapping[str, str]) -> str | None:
    if row["model_path"] not in _MODELS:
        return "mixtures of experts and other models"
    if row["backend"] not in FRAMEWORKS or row["system"] not in _GPUS or row["precision"] not in _PRECISIONS:
        return "engines, GPUs or precisions that the catalogue does not have"
    return None


def _run(row: Mapping[str, str]) -> Run:
    measured_by_inferencemax = row["silicon_data_source"].startswith("source_file=2026-")
    split = row["mode"] == "disagg"
    gpus, users = ("decode_tp_size", "decode_batch_size") if split else ("tp_size", "batch_size")
    prompt_tokens, output_tokens = _number(row, "isl"), _number(row, "osl")
    tensor_parallel = int(_number(row, gpus))
    held = (
        row["backend"] == "trtllm" and (prompt_tokens, output_tokens) == (1024, 1024) and tensor_parallel < 8
    )
    mean = _MEAN_LENGTH if measured_by_inferencemax else 1.0
    return Run(
        framework=row["backend"],
        model=MODELS[_MODELS[row["model_path"]]],
        gpu=GPUS[_GPUS[row["system"]]],
        weights=_PRECISIONS[row["precision"]],
        kv=KvPrecision.FP8 if measured_by_inferencemax else KvPrecision.BF16,
        tensor_parallel=tensor_parallel,
        users=int(_number(row, users)),
        prompt_tokens=mean * prompt_tokens,
        output_tokens=mean * output_tokens,
        held_steps=_HELD_STEPS if held and measured_by_inferencemax else 0,
        client=Client.INFERENCEMAX if measured_by_inferencemax else Client.OTHER,
        split=split,
        ttft_s=_number(row, "silicon_ttft_ms") * 1e-3,
        tpot_s=_number(row, "silicon_tpot_ms") * 1e-3,
    )


def _number(row: Mapping[str, str], column: str) -> float:
    try:
        number = float(row[column])
    except ValueError:
        raise ValueError(f"{column!r} is no number: {row[column]!r}") from None
    if not 0 < number < float("inf"):
        raise ValueError(f"{column!r} must be positive, not {row[column]!r}")
    return number
