"""Statistics of one quantity over many requests, in the fields that AIPerf exports."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

PERCENTILES: Final = (1, 5, 10, 25, 50, 75, 90, 95, 99)

Column = NDArray[np.float64]  # a value for each request, NaN where it is not known


def statistics(values: Column, unit: str) -> dict[str, Any] | None:
    """Over the known values; None when none is known. ``std`` is that of a sample, as AIPerf's."""
    known = values[~np.isnan(values)]
    if not len(known):
        return None
    percentiles = np.percentile(known, PERCENTILES).tolist()
    return {
        "unit": unit,
        "avg": rounded(float(known.mean())),
        "min": rounded(float(known.min())),
        "max": rounded(float(known.max())),
        **{f"p{which}": rounded(value) for which, value in zip(PERCENTILES, percentiles, strict=True)},
        "std": rounded(float(known.std(ddof=1)) if len(known) > 1 else 0.0),
    }


def in_ms(seconds: Column) -> dict[str, Any] | None:
    return statistics(seconds * 1e3, "ms")


def mean_ms(seconds: Column) -> float | None:
    known = seconds[~np.isnan(seconds)]
    return rounded(float(known.mean()) * 1e3) if len(known) else None


def ratio(part: float, whole: float) -> float:
    return rounded(part / whole) if whole else 0.0


def rounded(value: float) -> float:
    """So that reports do not tell of the last bits, which differ between processors."""
    return round(value, 6)
