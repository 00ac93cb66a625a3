"""Coefficients that runs were made with are found again, from those runs and nothing else."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from silicon_table import COEFFICIENTS_OF, synthetic_runs

from simulator.accuracy import COEFFICIENTS, FRAMEWORKS, Client, Fitted, Run, fit, make_sample, predict

_CLIENTS = {client.value for client in Client}


def _values(fitted: Fitted) -> Iterator[tuple[str, float]]:
    for coefficient in COEFFICIENTS:
        name = coefficient.name
        yield name, fitted.request_s[Client(name)] if name in _CLIENTS else getattr(fitted.engine, name)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_known_coefficients_are_recovered(framework: str) -> None:
    """Within half of the freedom that a coefficient has: layers, steps and all-reduces are hard to tell apart."""
    true = COEFFICIENTS_OF[framework]
    runs = synthetic_runs(framework)
    fitted = fit(make_sample(runs))
    for coefficient, (name, found), (_, expected) in zip(
        COEFFICIENTS, _values(fitted), _values(true), strict=True
    ):
        assert found == pytest.approx(expected, abs=0.5 * coefficient.spread), name
    for prediction in predict(runs, fitted):
        assert abs(prediction.tpot_error) < 0.02
        assert abs(prediction.ttft_error) < 0.02


def test_the_same_runs_give_the_same_coefficients_in_any_order() -> None:
    runs = synthetic_runs("vllm")
    shuffled = [runs[i] for i in np.random.default_rng(1).permutation(len(runs)).tolist()]
    one, other = fit(make_sample(runs)), fit(make_sample(shuffled))
    assert one == fit(make_sample(runs))
    for (name, value), (_, again) in zip(_values(one), _values(other), strict=True):
        assert again == pytest.approx(value, rel=1e-3, abs=1e-7), name


def test_runs_that_nothing_explains_hardly_move_the_others() -> None:
    runs = synthetic_runs("vllm")
    broken = [replace(run, tpot_s=5 * run.tpot_s, ttft_s=run.ttft_s / 5) for run in runs[::20]]
    untouched: list[Run] = [run for i, run in enumerate(runs) if i % 20]
    fitted = fit(make_sample([*broken, *untouched]))
    errors = [abs(prediction.tpot_error) for prediction in predict(untouched, fitted)]
    assert np.median(errors) < 0.03


def test_nothing_measured_is_no_sample() -> None:
    with pytest.raises(ValueError, match="no runs"):
        make_sample([])
