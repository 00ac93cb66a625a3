"""What is learned online: by how much a class of instances is faster or slower than its catalogue entry."""

from __future__ import annotations

import json
from collections import deque
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

import numpy as np


class Scale:
    """One factor for a predicted time, learned from observed times.

    An exponential average of observed / predicted, each ratio clipped so that an outlier (a stall, a cold
    start) moves it by a bounded step; the factor itself stays within [1/16, 16].
    """

    LIMIT: Final = 16.0
    WEIGHT: Final = 0.05
    OUTLIER: Final = 4.0

    __slots__ = ("factor", "observations")

    def __init__(self, factor: float = 1.0, observations: int = 0) -> None:
        self.factor = factor
        self.observations = observations

    def observe(self, predicted_s: float, observed_s: float) -> None:
        """Learn from one time: ``predicted_s`` is the estimate with the factor of that moment."""
        if not predicted_s > 0.0:
            return
        ratio = min(max(observed_s / predicted_s, 1 / self.OUTLIER), self.OUTLIER)
        self.observations += 1
        # The first observations count as a plain average, so that a wrong catalogue entry is left quickly.
        weight = max(self.WEIGHT, 1.0 / (self.observations + 1))
        corrected = self.factor * (1.0 + weight * (ratio - 1.0))
        self.factor = min(max(corrected, 1 / self.LIMIT), self.LIMIT)


class Accuracy:
    """The latest predictions beside what was observed."""

    KEPT: Final = 512

    __slots__ = ("_pairs",)

    def __init__(self) -> None:
        self._pairs: deque[tuple[float, float]] = deque(maxlen=self.KEPT)

    def add(self, predicted_s: float, observed_s: float) -> None:
        self._pairs.append((predicted_s, observed_s))

    def summary(self) -> dict[str, Any]:
        """Means in seconds, and how far off the predictions were: bias, and quantiles of the relative error."""
        if not self._pairs:
            return {"count": 0}
        predicted, observed = np.array(self._pairs).T
        error = np.abs(predicted - observed) / np.maximum(observed, 1e-9)
        p50, p90 = np.quantile(error, [0.5, 0.9]).tolist()
        return {
            "count": len(predicted),
            "predicted_mean_s": float(predicted.mean()),
            "observed_mean_s": float(observed.mean()),
            "bias": float(predicted.mean() / max(observed.mean(), 1e-9) - 1.0),
            "error_p50": p50,
            "error_p90": p90,
        }


@dataclass(slots=True)
class Calibration:
    """What was learned of one instance class."""

    # Shorter prefills are dominated by HTTP and step granularity and say little about the slope.
    MIN_PREFILL_S: ClassVar[float] = 2e-3

    prefill: Scale = field(default_factory=Scale)
    decode: Scale = field(default_factory=Scale)
    ttft: Accuracy = field(default_factory=Accuracy)
    tbt: Accuracy = field(default_factory=Accuracy)

    def observe_prefill(self, predicted_s: float, observed_s: float) -> None:
        """A prefill alone on its engine took ``observed_s``."""
        if predicted_s >= self.MIN_PREFILL_S:
            self.prefill.observe(predicted_s, observed_s)

    def observe_decode(self, predicted_s: float, observed_s: float) -> None:
        """The mean gap between a request's tokens."""
        self.tbt.add(predicted_s, observed_s)
        self.decode.observe(predicted_s, observed_s)


_SCALES: Final = ("prefill", "decode")


def dump_calibrations(calibrations: dict[str, Calibration]) -> bytes:
    """The learned factors by instance class, for `load_calibrations`."""
    return json.dumps(
        {
            name: {
                which: {"factor": scale.factor, "observations": scale.observations}
                for which in _SCALES
                for scale in (getattr(calibration, which),)
            }
            for name, calibration in calibrations.items()
        }
    ).encode()


def _load_scale(entry: Any) -> Scale:
    return Scale(float(entry["factor"]), int(entry["observations"]))


def load_calibrations(saved: bytes) -> dict[str, Calibration]:
    """Raises ValueError when ``saved`` was not written by `dump_calibrations`."""
    try:
        loaded = {
            str(name): Calibration(_load_scale(entry["prefill"]), _load_scale(entry["decode"]))
            for name, entry in json.loads(saved).items()
        }
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"not a saved calibration: {error!r}") from None
    for name, calibration in loaded.items():
        for scale in (calibration.prefill, calibration.decode):
            if not 1 / Scale.LIMIT <= scale.factor <= Scale.LIMIT or scale.observations < 0:
                raise ValueError(f"the calibration of {name!r} is out of bounds")
    return loaded
