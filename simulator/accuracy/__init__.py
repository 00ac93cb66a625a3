"""The performance model beside measured runs: reading them, fitting coefficients, errors on what was held out."""

from __future__ import annotations

from simulator.accuracy.affine import AffineErrors, affine_errors
from simulator.accuracy.fitting import COEFFICIENTS, Fitted, fit, make_sample
from simulator.accuracy.held_out import (
    SPLITS,
    Errors,
    Prediction,
    errors_of,
    faster_than_peak,
    fit_all,
    held_out,
    in_sample,
    predict,
    split_decode_errors,
)
from simulator.accuracy.published import (
    COMPOSITES,
    DECODE_BATCHES,
    PREFILL_TOKENS,
    Composite,
    Figure,
    composite_figures,
    deepseek_figures,
    mooncake_figures,
)
from simulator.accuracy.silicon import FRAMEWORKS, Client, Run, Silicon, read_silicon

__all__ = [
    "COEFFICIENTS",
    "COMPOSITES",
    "DECODE_BATCHES",
    "FRAMEWORKS",
    "PREFILL_TOKENS",
    "SPLITS",
    "AffineErrors",
    "Client",
    "Composite",
    "Errors",
    "Figure",
    "Fitted",
    "Prediction",
    "Run",
    "Silicon",
    "affine_errors",
    "composite_figures",
    "deepseek_figures",
    "errors_of",
    "faster_than_peak",
    "fit",
    "fit_all",
    "held_out",
    "in_sample",
    "make_sample",
    "mooncake_figures",
    "predict",
    "read_silicon",
    "split_decode_errors",
]
