"""An engine's coefficients, fitted to measured closed loops: ten numbers, robust to runs that nothing explains."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from conductor.catalogue import KERNELS, ClosedLoops, Deployment, Engine, Times, closed_loops
from conductor.costs import Floats
from simulator.accuracy.silicon import Client, Run


@dataclass(frozen=True, slots=True)
class Coefficient:
    """A fitted number: where it starts and is drawn to, by how much it may stray freely, and its bounds."""

    name: str
    expected: float
    spread: float
    least: float
    most: float


# Fields of `Engine`, and the seconds that a request spends outside the engine under each client.
COEFFICIENTS: Final = (
    Coefficient("gemm_compute", 0.70, 0.15, 0.2, 1.0),
    Coefficient("gemm_memory", 0.85, 0.10, 0.4, 1.0),
    Coefficient("attention_memory", 1.0, 0.15, 0.3, 1.15),
    Coefficient("layer_s", 30e-6, 15e-6, 0.0, 100e-6),
    Coefficient("step_s", 1e-3, 1e-3, 0.0, 10e-3),
    Coefficient("sequence_s", 20e-6, 15e-6, 0.0, 100e-6),
    Coefficient("all_reduce_s", 8e-6, 5e-6, 0.0, 40e-6),
    Coefficient("met_prompts", 0.08, 0.30, 0.0, 1.0),
    Coefficient(Client.INFERENCEMAX.value, 50e-3, 50e-3, 0.0, 0.3),
    Coefficient(Client.OTHER.value, 50e-3, 50e-3, 0.0, 0.3),
)

# Engines whose steps hold either prompts or decoding sequences.
_UNMIXED: Final = frozenset({"sglang"})

# Logarithms of predicted over measured beyond this count linearly, and TTFT, the noisier, counts less than TPOT.
_OUTLIER: Final = 0.1
_TTFT_WEIGHT: Final = 0.6

Vector = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Fitted:
    """An engine's coefficients; ``request_s`` under the client that took the times."""

    engine: Engine
    request_s: dict[Client, float]


@dataclass(frozen=True, slots=True)
class Sample:
    """Runs of one framework with their loops, in the same order."""

    runs: tuple[Run, ...]
    loops: ClosedLoops
    inferencemax: NDArray[np.bool_]
    ttft_s: Floats
    tpot_s: Floats

    def predicted(self, fitted: Fitted) -> Times:
        """What coefficients say of the runs."""
        times = self.loops.times(fitted.engine)
        outside_s = np.where(
            self.inferencemax, fitted.request_s[Client.INFERENCEMAX], fitted.request_s[Client.OTHER]
        )
        return replace(times, ttft_s=times.ttft_s - fitted.engine.request_s + outside_s)


def engine_of(framework: str) -> Engine:
    """An engine that mixes prompts with decoding sequences as ``framework`` does, not fitted yet."""
    return replace(KERNELS, name=framework, mixes=framework not in _UNMIXED)


def deployment_of(run: Run, engine: Engine) -> Deployment:
    return Deployment(run.model, run.gpu, run.tensor_parallel, run.weights, run.kv, engine)


def make_sample(runs: Iterable[Run]) -> Sample:
    """The loops of aggregated runs of one framework. Raises ValueError for none, or for weights that do not fit."""

    def key(run: Run) -> tuple[Any, ...]:
        return (run.model.name, run.gpu.name, run.tensor_parallel, run.weights.value, run.kv.value)

    ordered = tuple(sorted(runs, key=key))
    if not ordered:
        raise ValueError("no runs to make a sample of")
    parts = []
    for _, group in groupby(ordered, key=key):
        alike = list(group)
        parts.append(
            closed_loops(
                deployment_of(alike[0], engine_of(alike[0].framework)),
                [run.users for run in alike],
                [run.prompt_tokens for run in alike],
                [run.output_tokens for run in alike],
                held_steps=[run.held_steps for run in alike],
            )
        )
    return Sample(
        runs=ordered,
        loops=ClosedLoops.gathered(parts),
        inferencemax=np.array([run.client is Client.INFERENCEMAX for run in ordered]),
        ttft_s=np.array([run.ttft_s for run in ordered]),
        tpot_s=np.array([run.tpot_s for run in ordered]),
    )


def fit(sample: Sample) -> Fitted:
    """The coefficients that best explain ``sample``, the same ones every time.

    Least squares of logarithms of predicted over measured times, linear for outliers (pseudo-Huber), with a weak
    pull to what is expected, so that a coefficient about which the runs say nothing stays there.
    """
    framework = sample.runs[0].framework

    def residuals(strays: Vector) -> Vector:
        times = sample.predicted(_fitted(framework, strays))
        return np.concatenate(
            [
                np.log(times.tpot_s / sample.tpot_s),
                _TTFT_WEIGHT * np.log(times.ttft_s / sample.ttft_s),
                _OUTLIER * strays,
            ]
        )

    return _fitted(framework, _least(residuals, 2 * len(sample.runs)))


_EXPECTED: Final = np.array([c.expected for c in COEFFICIENTS])
_SPREAD: Final = np.array([c.spread for c in COEFFICIENTS])
_LEAST: Final = (np.array([c.least for c in COEFFICIENTS]) - _EXPECTED) / _SPREAD
_MOST: Final = (np.array([c.most for c in COEFFICIENTS]) - _EXPECTED) / _SPREAD


def unfitted(framework: str) -> Fitted:
    """What is expected of a framework before anything was measured."""
    return _fitted(framework, np.zeros(len(COEFFICIENTS)))


def _fitted(framework: str, strays: Vector) -> Fitted:
    """Coefficients that are so many spreads away from what is expected."""
    values = (_EXPECTED + strays * _SPREAD).tolist()
    named = {c.name: value for c, value in zip(COEFFICIENTS, values, strict=True)}
    request_s = {client: named.pop(client.value) for client in Client}
    engine = replace(
        engine_of(framework), sparse_layer_s=KERNELS.sparse_layer_s, **named, source="fitted to measured runs"
    )
    return Fitted(engine, request_s)


def _least(residuals: Callable[[Vector], Vector], robust: int, rounds: int = 60) -> Vector:
    """Levenberg-Marquardt within the bounds; the first ``robust`` residuals count linearly when large."""

    def weights(r: Vector) -> Vector:
        weighed = np.ones_like(r)
        weighed[:robust] = 1 / np.sqrt(1 + (r[:robust] / _OUTLIER) ** 2)
        return weighed

    def cost(r: Vector) -> float:
        large = 2 * _OUTLIER**2 * (np.sqrt(1 + (r[:robust] / _OUTLIER) ** 2) - 1)
        return float(large.sum() + (r[robust:] ** 2).sum())

    at = np.zeros(len(COEFFICIENTS))
    there = residuals(at)
    least, damping = cost(there), 1e-2
    for _ in range(rounds):
        slopes = np.stack([(residuals(at + 1e-3 * axis) - there) / 1e-3 for axis in np.eye(len(at))], axis=1)
        weighed = slopes * weights(there)[:, None]
        normal, gradient = slopes.T @ weighed, weighed.T @ there
        for _ in range(10):
            damped = normal + damping * np.diag(np.diag(normal))
            moved = np.clip(at - np.linalg.solve(damped, gradient), _LEAST, _MOST)
            then = residuals(moved)
            if cost(then) < least:
                break
            damping *= 4
        else:
            return at
        at, there, gained, least = moved, then, least - cost(then), cost(then)
        if gained < 1e-7 * least:
            return at
        damping = max(damping / 3, 1e-8)
    return at


def split_half(runs: Sequence[Run], seed: int) -> tuple[list[Run], list[Run]]:
    """Two random halves, the same for the same seed."""
    order = np.random.default_rng(seed).permutation(len(runs)).tolist()
    middle = len(runs) // 2
    return [runs[i] for i in order[:middle]], [runs[i] for i in order[middle:]]
