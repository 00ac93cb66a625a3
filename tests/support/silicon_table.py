"""Runs as the silicon samples have them, made from known coefficients."""

import csv
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from conductor.catalogue import GPUS, KERNELS, MODELS, KvPrecision, WeightPrecision
from simulator.accuracy import Client, Fitted, Run, predict

COEFFICIENTS_OF = {
    framework: Fitted(
        replace(
            KERNELS,
            name=framework,
            gemm_compute=0.62,
            gemm_memory=0.80,
            attention_memory=0.9,
            layer_s=40e-6,
            step_s=step_s,
            sequence_s=30e-6,
            all_reduce_s=6e-6,
            met_prompts=met_prompts,
            mixes=framework != "sglang",
        ),
        {Client.INFERENCEMAX: 0.04, Client.OTHER: 0.09},
    )
    for framework, step_s, met_prompts in (
        ("sglang", 2e-3, 0.4),
        ("trtllm", 0.8e-3, 0.06),
        ("vllm", 1.5e-3, 0.1),
    )
}

_MODELS = {
    "llama-3-70b": "meta-llama/Llama-3.1-70B",
    "llama-3.1-8b": "meta-llama/Llama-3.1-8B-Instruct",
    "qwen3-32b": "Qwen/Qwen3-32B",
}
_GPUS = {"h100-80gb": "h100_sxm", "h200": "h200_sxm", "b200": "b200_sxm"}


def synthetic_runs(framework: str) -> list[Run]:
    """Three models on three GPUs, by both clients, with the times that `COEFFICIENTS_OF` says."""
    shapes = [
        Run(
            framework=framework,
            model=MODELS[model],
            gpu=GPUS[gpu],
            weights=WeightPrecision.FP8 if client is Client.INFERENCEMAX else WeightPrecision.BF16,
            kv=KvPrecision.FP8 if client is Client.INFERENCEMAX else KvPrecision.BF16,
            tensor_parallel=gpus,
            users=users,
            prompt_tokens=prompt * (0.9 if client is Client.INFERENCEMAX else 1.0),
            output_tokens=output * (0.9 if client is Client.INFERENCEMAX else 1.0),
            held_steps=20
            if (framework, client, prompt, output) == ("trtllm", Client.INFERENCEMAX, 1024, 1024) and gpus < 8
            else 0,
            client=client,
            split=False,
            ttft_s=1.0,
            tpot_s=1.0,
        )
        for model, gpu, gpu_counts, client in (
            ("llama-3-70b", "h200", (2, 4, 8), Client.INFERENCEMAX),
            ("llama-3.1-8b", "h100-80gb", (1, 2), Client.OTHER),
            ("qwen3-32b", "b200", (1, 4), Client.OTHER),
        )
        for gpus in gpu_counts
        for prompt, output in ((1024, 1024), (8192, 1024), (2048, 256))
        for users in (4, 16, 64)
    ]
    return [
        replace(prediction.run, ttft_s=prediction.ttft_s, tpot_s=prediction.tpot_s)
        for prediction in predict(shapes, COEFFICIENTS_OF[framework])
    ]


def row(run: Run) -> dict[str, str]:
    """One row of the table, as `read_silicon` reads it."""
    inferencemax = run.client is Client.INFERENCEMAX
    share = 0.9 if inferencemax else 1.0
    return {
        "silicon_data_source": f"source_file={'2026-04-06' if inferencemax else 'runs'}.csv; made up",
        "backend": run.framework,
        "model_path": _MODELS[run.model.name],
        "system": _GPUS[run.gpu.name],
        "precision": "" if run.weights is WeightPrecision.BF16 else run.weights.value,
        "mode": "agg",
        "isl": str(round(run.prompt_tokens / share)),
        "osl": str(round(run.output_tokens / share)),
        "batch_size": str(run.users),
        "tp_size": str(run.tensor_parallel),
        "decode_batch_size": "",
        "decode_tp_size": "",
        "silicon_ttft_ms": repr(1e3 * run.ttft_s),
        "silicon_tpot_ms": repr(1e3 * run.tpot_s),
    }


def write_table(path: Path, rows: Iterable[dict[str, str]]) -> Path:
    listed = list(rows)
    with path.open("w", newline="") as file:
        table = csv.DictWriter(file, list(listed[0]))
        table.writeheader()
        table.writerows(listed)
    return path
