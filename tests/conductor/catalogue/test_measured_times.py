"""Constants fitted to times."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conductor.catalogue import LLAMA_8B_H100, PrefillTime, StepTime, with_measured_times

PROMPTS = [(n, p) for n in (512, 2048, 8192, 32_768) for p in (0, n // 2)]
BATCHES = [(b, b * c) for b in (1, 8, 64) for c in (512, 4096)]
SECONDS = st.floats(1e-4, 1.0)


@given(SECONDS, SECONDS, SECONDS, SECONDS)
def test_times_of_a_class_give_that_class_back(a: float, b: float, c: float, d: float) -> None:
    true = replace(
        LLAMA_8B_H100,
        prefill_s_per_token=1e-2 * a,
        prefill_s_per_token_squared=1e-6 * b,
        prefill_base_s=c,
        prefill_s_per_cached_token=1e-2 * d,
        decode_base_s=a,
        decode_s_per_sequence=1e-1 * b,
        decode_s_per_context_token=1e-4 * c,
    )
    prefills = [PrefillTime(n, p, float(true.prefill_s(n, np.array([p]))[0])) for n, p in PROMPTS]
    steps = [StepTime(n, s, float(true.decode_step_s(np.array([n]), np.array([s]))[0])) for n, s in BATCHES]
    found = with_measured_times(LLAMA_8B_H100, prefills, steps)
    for time in prefills:
        at = np.array([time.cached_tokens])
        assert found.prefill_s(time.prompt_tokens, at)[0] == pytest.approx(time.seconds, rel=1e-6)
    for step in steps:
        batch, context = np.array([step.sequences]), np.array([step.context_tokens])
        assert found.decode_step_s(batch, context)[0] == pytest.approx(step.seconds, rel=1e-6)


def test_constants_are_never_negative() -> None:
    """Times that fall with the batch have no better explanation than a constant."""
    falling = [StepTime(n, n * 1000, 0.02 / n) for n in (1, 2, 4, 8)]
    found = with_measured_times(LLAMA_8B_H100, steps=falling)
    assert found.decode_base_s > 0
    assert (found.decode_s_per_sequence, found.decode_s_per_context_token) == (0.0, 0.0)


def test_what_was_not_measured_stays() -> None:
    steps = [StepTime(n, s, 0.01) for n, s in BATCHES]
    found = with_measured_times(LLAMA_8B_H100, steps=steps)
    assert found.prefill_s_per_token == LLAMA_8B_H100.prefill_s_per_token
    assert with_measured_times(LLAMA_8B_H100) == LLAMA_8B_H100
    uncached = [PrefillTime(n, 0, 0.01 + 1e-4 * n) for n in (512, 2048, 8192)]
    assert with_measured_times(LLAMA_8B_H100, uncached).prefill_s_per_cached_token == 0.0


def test_two_times_are_too_few() -> None:
    with pytest.raises(ValueError, match="2 prefill times are too few"):
        with_measured_times(LLAMA_8B_H100, [PrefillTime(1, 0, 1.0)] * 2)
    with pytest.raises(ValueError, match="1 decode step times are too few"):
        with_measured_times(LLAMA_8B_H100, steps=[StepTime(1, 1, 1.0)])
