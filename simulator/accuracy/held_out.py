"""Predictions of runs by coefficients that were fitted without them, and how far off they are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from conductor.catalogue import KERNELS, decode_step_s
from conductor.catalogue.gpus import Efficiency
from conductor.costs import Floats
from simulator.accuracy.fitting import (
    Fitted,
    deployment_of,
    engine_of,
    fit,
    make_sample,
    split_half,
    unfitted,
)
from simulator.accuracy.silicon import Client, Run


@dataclass(frozen=True, slots=True)
class Prediction:
    run: Run
    ttft_s: float
    tpot_s: float

    @property
    def ttft_error(self) -> float:
        """Relative; positive where predicted too slow."""
        return self.ttft_s / self.run.ttft_s - 1

    @property
    def tpot_error(self) -> float:
        return self.tpot_s / self.run.tpot_s - 1


@dataclass(frozen=True, slots=True)
class Errors:
    """Of predictions: medians and means of absolute relative errors, and the median relative error."""

    runs: int
    tpot_median: float
    tpot_mean: float
    tpot_bias: float
    ttft_median: float
    ttft_mean: float
    ttft_bias: float


def errors_of(predictions: Iterable[Prediction]) -> Errors:
    """Raises ValueError for no predictions."""
    pairs: Floats = np.array([(p.tpot_error, p.ttft_error) for p in predictions])
    if not len(pairs):
        raise ValueError("no predictions to take errors of")
    absolute = np.abs(pairs)
    tpot_median, ttft_median = np.median(absolute, axis=0).tolist()
    tpot_mean, ttft_mean = absolute.mean(axis=0).tolist()
    tpot_bias, ttft_bias = np.median(pairs, axis=0).tolist()
    return Errors(len(pairs), tpot_median, tpot_mean, tpot_bias, ttft_median, ttft_mean, ttft_bias)


def predict(runs: Iterable[Run], fitted: Fitted) -> list[Prediction]:
    """Of aggregated runs of the framework that ``fitted`` is of."""
    sample = make_sample(runs)
    times = sample.predicted(fitted)
    return [
        Prediction(run, ttft_s, tpot_s)
        for run, ttft_s, tpot_s in zip(sample.runs, times.ttft_s.tolist(), times.tpot_s.tolist(), strict=True)
    ]


def fit_all(runs: Iterable[Run]) -> dict[str, Fitted]:
    """Coefficients by framework, fitted to all of its aggregated runs."""
    return {framework: fit(make_sample(group)) for framework, group in _by_framework(runs).items()}


def in_sample(runs: Sequence[Run], fitted: dict[str, Fitted]) -> list[Prediction]:
    """Predictions of the very runs that were fitted to."""
    return [
        prediction
        for framework, group in _by_framework(runs).items()
        for prediction in predict(group, fitted[framework])
    ]


def held_out(runs: Iterable[Run], split: str) -> list[Prediction]:
    """Every aggregated run, predicted by coefficients that were fitted to others of its framework.

    ``split`` is a name of `SPLITS`: two random halves that predict each other, or all models, or all GPUs, but one.
    """
    predictions = []
    for group in _by_framework(runs).values():
        for kept, left_out in SPLITS[split](group):
            framework = left_out[0].framework
            fitted = fit(make_sample(kept)) if kept else unfitted(framework)
            predictions += predict(left_out, fitted)
    return predictions


def split_decode_errors(runs: Iterable[Run], fitted: dict[str, Fitted]) -> list[tuple[Run, float]]:
    """Relative errors of decode steps of disaggregated runs; how their prefills queue, their rows do not tell."""
    errors = []
    for run in runs:
        if run.split:
            deployment = deployment_of(run, fitted[run.framework].engine)
            context = int(run.users * (run.prompt_tokens + run.output_tokens / 2))
            errors.append((run, decode_step_s(deployment, run.users, context) / run.tpot_s - 1))
    return errors


def faster_than_peak(runs: Iterable[Run]) -> list[Run]:
    """Aggregated runs whose mean request was over sooner than the datasheet's peaks allow.

    All their prompts cannot have been computed while so many users were there: from these runs nothing is learned.
    """
    perfect = Efficiency(1.0, 1.0, 1.0, 1.0, 1.0, 1.0, source="the datasheet's peaks")
    idle = replace(
        KERNELS, gemm_compute=1.0, gemm_memory=1.0, layer_s=0.0, step_s=0.0, all_reduce_s=0.0, source="peaks"
    )
    found = []
    for group in _by_framework(runs).values():
        peaks = [replace(run, gpu=replace(run.gpu, efficiency=perfect)) for run in group]
        engine = replace(idle, mixes=engine_of(group[0].framework).mixes)
        for prediction in predict(peaks, Fitted(engine, dict.fromkeys(Client, 0.0))):
            run = prediction.run
            others = run.output_tokens - 1
            if run.ttft_s + others * run.tpot_s < prediction.ttft_s + others * prediction.tpot_s:
                found.append(run)
    return found


_Folds = list[tuple[list[Run], list[Run]]]


def _random_halves(runs: Sequence[Run]) -> _Folds:
    one, other = split_half(runs, seed=0)
    return [(one, other), (other, one)]


def _but_one(key: Callable[[Run], str]) -> Callable[[Sequence[Run]], _Folds]:
    def folds(runs: Sequence[Run]) -> _Folds:
        return [
            ([run for run in runs if key(run) != value], [run for run in runs if key(run) == value])
            for value in sorted({key(run) for run in runs})
        ]

    return folds


SPLITS: Final[dict[str, Callable[[Sequence[Run]], _Folds]]] = {
    "random": _random_halves,
    "model": _but_one(lambda run: run.model.name),
    "gpu": _but_one(lambda run: run.gpu.name),
}


def _by_framework(runs: Iterable[Run]) -> dict[str, list[Run]]:
    groups: dict[str, list[Run]] = {}
    for run in runs:
        if not run.split:
            groups.setdefault(run.framework, []).append(run)
    return dict(sorted(groups.items()))
