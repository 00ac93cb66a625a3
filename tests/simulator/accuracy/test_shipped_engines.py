"""The engines of the catalogue are what fits the silicon samples; skipped where the package is missing."""

import importlib.util
from pathlib import Path

import pytest

from conductor.catalogue import ENGINES
from simulator.accuracy import COEFFICIENTS, SPLITS, Client, errors_of, fit_all, held_out, read_silicon

_PACKAGE = importlib.util.find_spec("aiconfigurator_core")
pytestmark = pytest.mark.skipif(_PACKAGE is None, reason="aiconfigurator-core is not installed")


def test_the_catalogue_has_the_fitted_coefficients_and_the_stated_errors() -> None:
    assert _PACKAGE is not None
    assert _PACKAGE.origin is not None
    silicon = read_silicon(Path(_PACKAGE.origin).parent / "systems" / "silicon_sample.csv")
    clients = {client.value for client in Client}
    for framework, fitted in fit_all(silicon.runs).items():
        for coefficient in COEFFICIENTS:
            if coefficient.name not in clients:
                shipped = getattr(ENGINES[framework], coefficient.name)
                again = getattr(fitted.engine, coefficient.name)
                assert shipped == pytest.approx(again, rel=0.01, abs=0.05 * coefficient.spread), (
                    coefficient.name
                )
    for split, (tpot, ttft) in {"random": (0.06, 0.18), "model": (0.11, 0.32), "gpu": (0.09, 0.36)}.items():
        assert split in SPLITS
        errors = errors_of(held_out(silicon.runs, split))
        assert errors.tpot_median < tpot
        assert errors.ttft_median < ttft
