"""The roofline against end-to-end runs of mixtures that NVIDIA AIConfigurator ships; skipped where it is missing.

``pip install --target DIR --no-deps aiconfigurator-core``, then with DIR on PYTHONPATH run this file with -s to
print the table of docs/catalogue.md. The coefficients of engines were fitted to dense models only
(docs/accuracy.md): what is predicted here was held out altogether, but for the one constant of a sparse layer.
"""

import csv
import importlib.util
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest

from conductor.catalogue import (
    ENGINES,
    GPUS,
    MODELS,
    Deployment,
    WeightPrecision,
    closed_loops,
    kv_capacity_tokens,
)

_PACKAGE = importlib.util.find_spec("aiconfigurator_core")
pytestmark = pytest.mark.skipif(_PACKAGE is None, reason="aiconfigurator-core is not installed")

_MODELS = {"deepseek-ai/DeepSeek-R1": "deepseek-v3", "zhipuai/GLM-5": "glm-5.2"}  # same layers and experts
_GPUS = {"h100_sxm": "h100-80gb", "h200_sxm": "h200", "b200_sxm": "b200", "b300_sxm": "b300"}


def _runs() -> Iterator[Mapping[str, str]]:
    """Aggregated runs in FP8 on at most one node, tensor parallel only."""
    assert _PACKAGE is not None
    assert _PACKAGE.origin is not None
    with (Path(_PACKAGE.origin).parent / "systems" / "silicon_sample.csv").open() as file:
        for run in csv.DictReader(file):
            if run["mode"] != "agg" or run["precision"] != "fp8":
                continue
            if run["model_path"] not in _MODELS or run["system"] not in _GPUS:
                continue
            parallel = {key: float(run[key] or 0) for key in ("tp_size", "pp_size", "attention_dp_size")}
            if parallel["tp_size"] <= 8 and parallel["pp_size"] <= 1 and parallel["attention_dp_size"] <= 1:
                yield run


def _errors() -> dict[tuple[str, str, str], list[float]]:
    """Relative errors of the predicted time per output token, by model, GPU and engine."""
    errors = defaultdict(list)
    for run in _runs():
        model, gpu, engine = _MODELS[run["model_path"]], _GPUS[run["system"]], ENGINES[run["backend"]]
        gpus = int(float(run["tp_size"]))
        deployment = Deployment(MODELS[model], GPUS[gpu], gpus, WeightPrecision.FP8, engine=engine)
        batch, prompt, output = (int(float(run[key])) for key in ("batch_size", "isl", "osl"))
        try:
            fits = batch * (prompt + output) <= kv_capacity_tokens(deployment)
        except ValueError:
            continue
        if not fits:
            continue
        tpot_s = closed_loops(deployment, batch, 0.9 * prompt, 0.9 * output).times(engine).tpot_s[0]
        errors[model, gpu, engine.name].append(tpot_s / (float(run["silicon_tpot_ms"]) * 1e-3) - 1)
    return errors


def test_time_per_output_token_of_mixtures() -> None:
    errors = _errors()
    for (model, gpu, backend), group in sorted(errors.items()):
        values = np.array(group)
        print(
            f"\n{model:13} {gpu:9} {backend:7} {len(values):4} runs: MAPE {np.abs(values).mean():4.0%}, "
            f"median {np.median(np.abs(values)):4.0%}, bias {values.mean():+4.0%}",
            end="",
        )
    values = np.concatenate(list(errors.values()))
    print(f"\nall: {len(values)} runs, MAPE {np.abs(values).mean():.1%}, bias {values.mean():+.1%}", end="")
    assert np.abs(values).mean() < 0.32
