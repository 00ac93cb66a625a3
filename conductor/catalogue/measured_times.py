"""An instance class's constants from times of prefills and decode steps, measured or computed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from conductor.costs import Floats, InstanceClass


@dataclass(frozen=True, slots=True)
class PrefillTime:
    """A prompt of ``prompt_tokens`` tokens, of which ``cached_tokens`` were in the device, alone in its engine."""

    prompt_tokens: int
    cached_tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class StepTime:
    """A decode step of ``sequences`` requests over ``context_tokens`` tokens in total."""

    sequences: int
    context_tokens: int
    seconds: float


def with_measured_times(
    instance_class: InstanceClass,
    prefills: Sequence[PrefillTime] = (),
    steps: Sequence[StepTime] = (),
) -> InstanceClass:
    """``instance_class`` with the constants of prefill, of decode or of both fitted to times.

    The constants are not negative and minimise relative errors; one that the times do not tell is 0: of a cached
    token where nothing was cached, of a token's square where all prompts are as long. Raises ValueError for fewer
    than three times of a kind.
    """
    for what, times in (("prefill", prefills), ("decode step", steps)):
        if 0 < len(times) < 3:
            raise ValueError(f"{len(times)} {what} times are too few to fit; give three or more")
    if prefills:
        per_token, per_token_squared, base, per_cached_token = _least_relative_errors(
            (
                (n - p, n * n - p * p, 1.0, float(p))
                for n, p in ((time.prompt_tokens, time.cached_tokens) for time in prefills)
            ),
            [time.seconds for time in prefills],
        )
        instance_class = replace(
            instance_class,
            prefill_s_per_token=per_token,
            prefill_s_per_token_squared=per_token_squared,
            prefill_base_s=base,
            prefill_s_per_cached_token=per_cached_token,
        )
    if steps:
        base, per_sequence, per_context_token = _least_relative_errors(
            ((1.0, float(time.sequences), float(time.context_tokens)) for time in steps),
            [time.seconds for time in steps],
        )
        instance_class = replace(
            instance_class,
            decode_base_s=base,
            decode_s_per_sequence=per_sequence,
            decode_s_per_context_token=per_context_token,
        )
    return instance_class


def _least_relative_errors(rows: Iterable[tuple[float, ...]], seconds: Sequence[float]) -> list[float]:
    """Non-negative coefficients of the rows' columns that minimise the squared relative errors of ``seconds``."""
    terms: Floats = np.array(list(rows)) / np.array(seconds)[:, None]
    # Columns of like size: n and n^2 are six orders of magnitude apart.
    scale = np.abs(terms).max(axis=0)
    kept = np.flatnonzero(scale).tolist()
    while True:
        solution = np.linalg.lstsq(terms[:, kept] / scale[kept], np.ones(len(terms)), rcond=None)[0]
        if (solution >= 0).all():
            break
        kept.pop(int(np.argmin(solution)))
    coefficients = np.zeros(len(scale))
    coefficients[kept] = solution / scale[kept]
    return [float(c) for c in coefficients]
