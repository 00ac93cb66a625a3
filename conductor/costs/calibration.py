"""What is learned online: by how much a class of instances is faster or slower than its catalogue entry."""

from __future__ import annotations

import json
import math
from collections import deque
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

import numpy as np


class Scale:
    """One factor for predicted times, learned from observed ones.

    The ratio of two sums, of what was observed and of what would have been predicted without any factor, both
    fading by a twentieth with every observation. Sums bear what single ratios do not: prompts that end in one
    step of an engine show the whole time at the first of them and none at the others. An observation counts at
    most four times its prediction, so an outlier (a stall, a cold start) moves the factor by a bounded step;
    the factor stays within [1/16, 16].
    """

    LIMIT: Final = 16.0
    FADE: Final = 0.05
    OUTLIER: Final = 4.0

    __slots__ = ("_observed_s", "_raw_s", "factor", "observations")

    def __init__(self, factor: float = 1.0, observations: int = 0, raw_s: float = 0.0) -> None:
        """``raw_s`` is how much prediction the factor rests on; 0 for a factor that nothing was learned of."""
        self.factor = factor
        self.observations = observations
        self._raw_s = raw_s
        self._observed_s = factor * raw_s

    @property
    def raw_s(self) -> float:
        """The faded sum of predictions without the factor."""
        return self._raw_s

    def observe(self, raw_s: float, observed_s: float) -> None:
        """Learn from one time; ``raw_s`` is its estimate without the factor, of this moment or any other."""
        if not raw_s > 0.0:
            return
        if self._raw_s == 0.0:  # what the catalogue says counts as one observation
            self._raw_s, self._observed_s = raw_s, self.factor * raw_s
        most_s = self.OUTLIER * self.factor * raw_s
        # Comparisons, and not min and max, which take a microsecond together here: this is learned twice a request.
        if observed_s < 0.0:
            observed_s = 0.0
        elif observed_s > most_s:
            observed_s = most_s
        self.observations += 1
        self._raw_s = _KEEP * self._raw_s + raw_s
        self._observed_s = _KEEP * self._observed_s + observed_s
        factor = self._observed_s / self._raw_s
        self.factor = factor if _LEAST <= factor <= self.LIMIT else min(max(factor, _LEAST), self.LIMIT)


_KEEP: Final = 1.0 - Scale.FADE
_LEAST: Final = 1.0 / Scale.LIMIT


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

    def observe_prefill(self, raw_s: float, observed_s: float) -> None:
        """A prefill alone on its engine took ``observed_s``; ``raw_s`` is its estimate without the factor."""
        if raw_s >= self.MIN_PREFILL_S:
            self.prefill.observe(raw_s, observed_s)

    def observe_decode(self, raw_s: float, observed_s: float) -> None:
        """The mean gap between a request's tokens; ``raw_s`` is the step's estimate without the factor."""
        self.tbt.add(self.decode.factor * raw_s, observed_s)
        self.decode.observe(raw_s, observed_s)


_SCALES: Final = ("prefill", "decode")


def dump_calibrations(calibrations: dict[str, Calibration]) -> bytes:
    """The learned factors by instance class, for `load_calibrations`."""
    return json.dumps(
        {
            name: {
                which: {
                    "factor": scale.factor,
                    "observations": scale.observations,
                    "raw_s": scale.raw_s,
                }
                for which in _SCALES
                for scale in (getattr(calibration, which),)
            }
            for name, calibration in calibrations.items()
        }
    ).encode()


def _load_scale(entry: Any) -> Scale:
    return Scale(float(entry["factor"]), int(entry["observations"]), float(entry["raw_s"]))


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
            bounded = 1 / Scale.LIMIT <= scale.factor <= Scale.LIMIT and 0.0 <= scale.raw_s < math.inf
            if not bounded or scale.observations < 0:
                raise ValueError(f"the calibration of {name!r} is out of bounds")
    return loaded
