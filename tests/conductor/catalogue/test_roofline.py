"""The roofline against composites of measured kernels; run with -s to print the errors docs/catalogue.md states."""

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conductor.catalogue import (
    DEPLOYMENTS,
    GPUS,
    MODELS,
    Deployment,
    WeightPrecision,
    chunked_prefill_s,
    decode_step_s,
    kv_capacity_tokens,
    prefill_s,
)
from simulator.accuracy import COMPOSITES, DECODE_BATCHES, PREFILL_TOKENS, Composite


def _prefill_errors(reference: Composite) -> list[float]:
    return [
        prefill_s(reference.deployment, tokens) / (tokens / speed) - 1
        for tokens, speed in zip(PREFILL_TOKENS, reference.prefill_tokens_per_s, strict=True)
    ]


def _decode_errors(reference: Composite) -> list[float]:
    return [
        decode_step_s(reference.deployment, batch, batch * context) / (step_ms * 1e-3) - 1
        for (batch, context), step_ms in zip(DECODE_BATCHES, reference.decode_step_ms, strict=True)
    ]


def _on(gpu: str) -> Iterator[Composite]:
    return (reference for reference in COMPOSITES if reference.deployment.gpu.name == gpu)


@pytest.mark.parametrize(
    ("gpu", "prefill_bound", "decode_bound"), [("a100-80gb", 0.06, 0.14), ("h100-80gb", 0.08, 0.06)]
)
def test_mean_error_of_the_roofline(gpu: str, prefill_bound: float, decode_bound: float) -> None:
    prefill = np.array([_prefill_errors(reference) for reference in _on(gpu)])
    decode = np.array([_decode_errors(reference) for reference in _on(gpu)])
    for reference, row, steps in zip(_on(gpu), prefill, decode, strict=True):
        d = reference.deployment
        print(
            f"\n{d.model.name} {d.tensor_parallel} x {gpu}: prefill {np.round(100 * row, 1)} %, "
            f"decode {np.round(100 * steps, 1)} %",
            end="",
        )
    for what, errors, bound in (("prefill", prefill, prefill_bound), ("decode", decode, decode_bound)):
        mape, bias = float(np.abs(errors).mean()), float(errors.mean())
        print(f"\n{gpu} {what}: MAPE {mape:.1%}, bias {bias:+.1%}, worst {np.abs(errors).max():.1%}", end="")
        assert mape < bound


def test_every_single_prediction_is_within_thirty_per_cent() -> None:
    for reference in COMPOSITES:
        assert max(map(abs, _prefill_errors(reference) + _decode_errors(reference))) < 0.30


@pytest.mark.parametrize("name", sorted(DEPLOYMENTS))
@given(st.integers(1, 8192), st.integers(0, 30_000))
@settings(max_examples=25)
def test_more_work_never_takes_less_time(name: str, tokens: int, context: int) -> None:
    deployment = DEPLOYMENTS[name]
    base = prefill_s(deployment, tokens, context)
    assert 0 < base <= prefill_s(deployment, tokens + 64, context) * (1 + 1e-9)
    assert base <= prefill_s(deployment, tokens, context + 4096) * (1 + 1e-9)
    batch = 1 + tokens % 256
    step = decode_step_s(deployment, batch, batch * (context + 1))
    assert 0 < step <= decode_step_s(deployment, batch, batch * (context + 1025)) * (1 + 1e-9)
    assert step <= decode_step_s(deployment, batch + 1, (batch + 1) * (context + 1)) * (1 + 1e-9)


def test_chunks_cost_a_little_more_than_one_pass_and_skip_what_is_cached() -> None:
    deployment = DEPLOYMENTS["llama-3-70b-8xh100"]
    whole = prefill_s(deployment, 32_768)
    chunked = chunked_prefill_s(deployment, 32_768, 0, 8192)
    assert whole < chunked < 1.1 * whole
    assert chunked_prefill_s(deployment, 32_768, 32_768) == 0
    assert chunked_prefill_s(deployment, 32_768, 24_576) == prefill_s(deployment, 8192, 24_576)


def test_more_gpus_are_faster_but_not_in_proportion() -> None:
    four, eight = DEPLOYMENTS["llama-3-70b-4xh100"], DEPLOYMENTS["llama-3-70b-8xh100"]
    assert 1 < prefill_s(four, 8192) / prefill_s(eight, 8192) < 2
    assert 1 < decode_step_s(four, 16, 65_536) / decode_step_s(eight, 16, 65_536) < 2


def test_a_mixture_decodes_small_batches_as_fast_as_its_active_weights_allow() -> None:
    """One token reads eight experts a layer of 256, 64 tokens most of them."""
    v3 = DEPLOYMENTS["deepseek-v3-8xh200"]
    one, many = decode_step_s(v3, 1, 1024), decode_step_s(v3, 64, 64 * 1024)
    assert many > 1.8 * one
    assert many < 64 * one / 10


def test_capacity_beside_the_weights() -> None:
    """Llama-3.1-8B on one H100: 90 % of 80 GB less 16 GB of weights and 3.5 GB of runtime."""
    deployment = Deployment(MODELS["llama-3.1-8b"], GPUS["h100-80gb"])
    assert kv_capacity_tokens(deployment) == pytest.approx((72e9 - 16.06e9 - 3.5e9) / 131_072, rel=1e-3)


def test_replicated_entries_do_not_profit_from_more_gpus() -> None:
    v3 = DEPLOYMENTS["deepseek-v3-8xh200"]
    per_gpu = 141e9 * 0.9 - 671e9 / 8 - 3.5e9
    assert kv_capacity_tokens(v3) == pytest.approx(per_gpu / 70_272, rel=1e-3)


def test_weights_that_do_not_fit_are_refused_with_the_remedy() -> None:
    deployment = Deployment(MODELS["llama-3-70b"], GPUS["h100-80gb"], 1, WeightPrecision.BF16)
    with pytest.raises(
        ValueError, match=r"llama-3-70b in bf16 \(141 GB\) does not fit 1 x h100-80gb.*tensor_parallel"
    ):
        kv_capacity_tokens(deployment)
    with pytest.raises(ValueError, match="tensor_parallel must be at least 1"):
        Deployment(MODELS["llama-3-70b"], GPUS["h100-80gb"], 0)
