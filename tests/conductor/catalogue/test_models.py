"""Shapes give the published parameter counts, and every size of the survey's table of KV caches."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conductor.catalogue import (
    MODELS,
    AttentionKind,
    KvPrecision,
    WeightPrecision,
    active_parameters,
    kv_bytes,
    kv_bytes_per_token,
    total_parameters,
    weights_bytes,
)

KIB, GIB = 1024, 1024**3
MILLION_TOKENS = 1024 * 1024


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        ("llama-3.1-8b", 8.03e9, 8.03e9),
        ("llama-3-70b", 70.55e9, 70.55e9),
        ("qwen3-32b", 32.8e9, 32.8e9),
        ("qwen3-30b-a3b", 30.5e9, 3.3e9),
        ("deepseek-v3", 671e9, 37e9),
        ("deepseek-v4-pro", 1.6e12, 49e9),
        ("glm-5.2", 744e9, 40e9),
        ("kimi-k2", 1.04e12, 32e9),
    ],
)
def test_parameters_counted_from_shapes_are_the_published_ones(
    name: str, total: float, active: float
) -> None:
    assert total_parameters(MODELS[name]) == pytest.approx(total, rel=0.02)
    assert active_parameters(MODELS[name]) == pytest.approx(active, rel=0.035)


@pytest.mark.parametrize(
    ("name", "per_token", "million_gib"),
    [
        ("llama-3.1-8b", 131_072, 128.0),
        ("llama-3-70b", 327_680, 320.0),  # "320 KB", "320 GB"
        ("glm-5.2-estimate", 327_680, 320.0),  # "~328 KB", "~343 GB": decimal units of the same sizes
        ("deepseek-v3", 61 * 1152, 68.625),  # "~68.6 KB": binary
    ],
)
def test_size_of_a_token_and_of_a_million(name: str, per_token: int, million_gib: float) -> None:
    model = MODELS[name]
    assert kv_bytes_per_token(model) == per_token
    assert kv_bytes_per_token(model, KvPrecision.FP16) == per_token
    assert kv_bytes(model, MILLION_TOKENS) == million_gib * GIB


def test_llama_70b_at_its_context_lengths() -> None:
    llama = MODELS["llama-3-70b"]
    assert kv_bytes(llama, 128 * KIB) == 40 * GIB
    assert kv_bytes(llama, 32 * KIB) == 10 * GIB
    assert weights_bytes(llama, WeightPrecision.FP8) == pytest.approx(70e9, rel=0.01)


def test_decimal_sizes_of_the_glm_estimate() -> None:
    estimate = MODELS["glm-5.2-estimate"]
    assert kv_bytes_per_token(estimate) == pytest.approx(328e3, rel=0.001)
    assert kv_bytes(estimate, MILLION_TOKENS) == pytest.approx(343e9, rel=0.002)
    assert weights_bytes(estimate, WeightPrecision.FP8) == 170e9


def test_glm_as_published_is_much_smaller_per_token_and_larger_in_weights_than_the_estimate() -> None:
    glm = MODELS["glm-5.2"]
    assert glm.kind is AttentionKind.MLA
    # 78 layers of 512 + 64, and an indexer key of 128 in 21 of them.
    assert kv_bytes_per_token(glm) == 2 * (78 * 576 + 21 * 128)
    assert weights_bytes(glm, WeightPrecision.FP8) == pytest.approx(744e9, rel=0.01)


def test_latent_attention_of_deepseek_v3() -> None:
    v3 = MODELS["deepseek-v3"]
    per_layer = kv_bytes_per_token(v3) / v3.layers
    assert per_layer == 1152
    assert per_layer / (2 * 8 * 128 * 2) == pytest.approx(0.28, abs=0.002)
    assert weights_bytes(v3, WeightPrecision.FP8) == pytest.approx(671e9, rel=0.001)
    # The survey's "~72 GB" multiplies binary kilobytes (68.6) by 1,048,576; the size is 73.7 GB or 68.6 GiB.
    mixed_units = kv_bytes_per_token(v3) / KIB * 1000 * MILLION_TOKENS
    assert mixed_units == pytest.approx(72e9, rel=0.001)
    assert kv_bytes(v3, MILLION_TOKENS) == pytest.approx(73.7e9, rel=0.001)


def test_hybrid_attention_of_deepseek_v4_pro() -> None:
    v4 = MODELS["deepseek-v4-pro"]
    assert kv_bytes(v4, MILLION_TOKENS) / GIB == pytest.approx(9.62, abs=0.005)
    assert kv_bytes_per_token(v4) == pytest.approx(10e3, rel=0.02)
    compact = kv_bytes(v4, MILLION_TOKENS, KvPrecision.FP8_FP4_INDEXER)
    assert compact / GIB == pytest.approx(4.8, abs=0.03)
    assert weights_bytes(v4, WeightPrecision.FP4_EXPERTS) == pytest.approx(800e9, rel=0.06)


def test_hybrid_parts_of_a_million_tokens() -> None:
    """The arithmetic behind 9.62 GiB: c4a entries, their indexer keys, c128a entries, windows."""
    entry, key = 512 * 2, 128 * 2
    parts = (
        30 * MILLION_TOKENS / 4 * entry,
        30 * MILLION_TOKENS / 4 * key,
        31 * MILLION_TOKENS / 128 * entry,
        61 * 128 * entry,
    )
    assert kv_bytes(MODELS["deepseek-v4-pro"], MILLION_TOKENS) == sum(parts)


def test_sliding_window_is_the_only_part_that_is_not_proportional() -> None:
    v4 = MODELS["deepseek-v4-pro"]
    window = 61 * 128 * 1024
    for context in (1024, 32 * KIB, MILLION_TOKENS):
        assert kv_bytes(v4, context) == pytest.approx(context * kv_bytes_per_token(v4) + window)
    assert window / kv_bytes(v4, 32 * KIB) == pytest.approx(0.025, abs=0.001)


def test_multi_head_attention_costs_eight_times_grouped() -> None:
    mha, gqa = MODELS["mha-70b"], MODELS["llama-3-70b"]
    assert (mha.kind, gqa.kind) == (AttentionKind.MHA, AttentionKind.GQA)
    assert kv_bytes_per_token(mha) / mha.layers == 32 * KIB
    assert kv_bytes_per_token(mha) == 8 * kv_bytes_per_token(gqa)


@given(st.sampled_from(sorted(MODELS)), st.integers(1, 1_000_000), st.integers(1, 1_000_000))
def test_longer_contexts_and_wider_numbers_cost_more(name: str, one: int, other: int) -> None:
    model = MODELS[name]
    shorter, longer = sorted((one, other))
    for precision in KvPrecision:
        assert kv_bytes(model, shorter, precision) <= kv_bytes(model, longer, precision)
    assert kv_bytes(model, one, KvPrecision.INT4) < kv_bytes(model, one, KvPrecision.FP8)
    assert kv_bytes(model, one, KvPrecision.FP8) < kv_bytes(model, one, KvPrecision.BF16)


def test_every_model_names_its_source() -> None:
    assert all(model.source for model in MODELS.values())
