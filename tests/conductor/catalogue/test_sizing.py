"""The survey's sizing figures, each from sizes of the catalogue; where the survey's own units differ, both."""

import pytest

from conductor.catalogue import MODELS, KvPrecision, WeightPrecision, kv_bytes, weights_bytes
from conductor.catalogue.sizing import (
    Cluster,
    break_even,
    concurrency,
    concurrency_table,
    inflection_requests,
    layers_of_saving,
    load_s,
    reuse_bandwidth_bytes_per_s,
)
from conductor.catalogue.tiers import MEMORY_POOL, POD_FLASH

KIB, GIB = 1024, 1024**3
CONTEXTS = [32 * KIB, 128 * KIB, 256 * KIB, 512 * KIB, 1024 * KIB]
V4_PRECISIONS = [KvPrecision.BF16, KvPrecision.FP8_FP4_INDEXER]
V4 = MODELS["deepseek-v4-pro"]
# "288 GB HBM; 155 GB weights, 25 GB runtime -> 110 GB for KV": the difference is 108.
THOUSAND_B300 = Cluster(gpus=1000, hbm_bytes=288e9, weights_bytes=155e9, runtime_bytes=25e9)


def test_concurrency_on_a_thousand_b300() -> None:
    """As the survey has it but for short contexts, which its sizes (1M divided) leave without sliding window.

    It prints 333/666 at 32K and 83/166 at 128K.
    """
    table = concurrency_table(V4, THOUSAND_B300, CONTEXTS, V4_PRECISIONS)
    assert THOUSAND_B300.kv_budget_bytes == 108e9
    assert [row.concurrency.per_gpu for row in table] == [326, 649, 83, 165, 41, 83, 20, 41, 10, 20]
    assert table[-1].concurrency.on_cluster == 20_000


def test_survey_s_own_arithmetic_of_the_same_table() -> None:
    """Its sizes, rounded and proportional to the context, against 100 GB: neither its 110 nor 108."""
    sizes_gb = {32: (0.30, 0.15), 128: (1.2, 0.6), 256: (2.4, 1.2), 512: (4.8, 2.4), 1024: (9.6, 4.8)}
    printed = {32: (333, 666), 128: (83, 166), 256: (41, 83), 512: (20, 41), 1024: (10, 20)}
    for context, sizes in sizes_gb.items():
        for size, precision, count in zip(sizes, V4_PRECISIONS, printed[context], strict=True):
            assert concurrency(1000, 100.0, size).per_gpu == count
            assert kv_bytes(V4, context * KIB, precision) / GIB == pytest.approx(size, rel=0.035)


def test_a_request_larger_than_a_gpu_takes_several() -> None:
    million = kv_bytes(MODELS["glm-5.2-estimate"], 1024 * KIB)
    answer = concurrency(1000, THOUSAND_B300.kv_budget_bytes, million)
    assert (answer.per_gpu, answer.gpus_per_request, answer.on_cluster) == (0, 4, 250)


def test_no_room_for_kv_cache_is_refused() -> None:
    full = Cluster(gpus=1, hbm_bytes=80e9, weights_bytes=140e9, runtime_bytes=0)
    assert full.kv_budget_bytes == 0
    with pytest.raises(ValueError, match="no memory is left"):
        concurrency_table(V4, full, CONTEXTS, V4_PRECISIONS)


def _inflections(name: str, weights: float, contexts: list[int], precision: KvPrecision) -> list[int]:
    return [inflection_requests(MODELS[name], weights, context, precision) for context in contexts]


def test_inflection_of_llama_70b() -> None:
    """27, 7 and 2 hold with the KV cache in FP8 as well (215K tokens); at the 320 KB it names, 14, 4 and 1."""
    contexts = [8 * KIB, 32 * KIB, 128 * KIB]
    assert _inflections("llama-3-70b", 70e9, contexts, KvPrecision.FP8) == [27, 7, 2]
    assert _inflections("llama-3-70b", 70e9, contexts, KvPrecision.BF16) == [14, 4, 1]
    assert 0.5 * 70e9 / kv_bytes(MODELS["llama-3-70b"], 1, KvPrecision.FP8) == pytest.approx(215e3, rel=0.01)


def test_inflection_of_deepseek_v3() -> None:
    """The survey prints 84 and 21, which MLA does not give: they are those of GQA 8 x 128 in FP8 over 61 layers."""
    contexts = [32 * KIB, 128 * KIB]
    weights = weights_bytes(MODELS["deepseek-v3"], WeightPrecision.FP8)
    assert _inflections("deepseek-v3", weights, contexts, KvPrecision.BF16) == [146, 37]
    assert _inflections("deepseek-v3", weights, contexts, KvPrecision.FP8) == [292, 73]
    gqa_token_bytes = 2 * 61 * 8 * 128
    assert [round(0.5 * weights / (gqa_token_bytes * context)) for context in (32_000, 128_000)] == [84, 21]


def test_inflection_of_the_glm_estimate() -> None:
    """3 and 1, at 128,000 and a million tokens; the survey does not name the lengths."""
    printed = _inflections("glm-5.2-estimate", 170e9, [128_000, 1_000_000], KvPrecision.BF16)
    assert printed == [3, 1]
    glm = MODELS["glm-5.2"]
    weights = weights_bytes(glm, WeightPrecision.FP8)
    as_published = [inflection_requests(glm, weights, c) for c in (32 * KIB, 128 * KIB, 1024 * KIB)]
    assert as_published == [120, 30, 4]


def test_break_even_of_the_thousand_gpu_cluster() -> None:
    """$1.17 M at $0.87 a million tokens is 1.34 trillion tokens, not the survey's 1.34 billion.

    Its 1.34 B a month, 45 M and 4,500 requests a day follow from $0.87 a thousand tokens.
    """
    answer = break_even(1.17e6, 0.87, 10_000)
    assert answer.output_tokens_per_month == pytest.approx(1.34e12, rel=0.005)
    assert answer.output_tokens_per_day == pytest.approx(45e9, rel=0.005)
    assert answer.requests_per_day == pytest.approx(4.5e6, rel=0.005)

    per_thousand = break_even(1.17e6, 0.87 * 1000, 10_000)
    assert per_thousand.output_tokens_per_month == pytest.approx(1.34e9, rel=0.005)
    assert per_thousand.output_tokens_per_day == pytest.approx(45e6, rel=0.005)
    assert per_thousand.requests_per_day == pytest.approx(4500, rel=0.005)


def test_layers_of_saving_of_deepseek_v4() -> None:
    steps = layers_of_saving(V4, 1024 * KIB, KvPrecision.FP8_FP4_INDEXER, 0.85, uncompressed_bytes=170 * GIB)
    assert [step.request_bytes / GIB for step in steps] == pytest.approx([170, 9.62, 4.80, 0.72], rel=0.006)
    assert [round(step.factor) for step in steps[:3]] == [1, 18, 35]
    # 236 divides the rounded 0.72; the unrounded size gives 235.
    assert round(steps[3].factor) == 235
    assert round(170 / 0.72) == 236


def test_savings_against_gqa_of_the_same_layers() -> None:
    """The survey's 170 GB has no derivation; 61 layers of GQA 8 x 128 in BF16 would store 244 GiB."""
    steps = layers_of_saving(V4, 1024 * KIB, KvPrecision.FP8_FP4_INDEXER, 0.85)
    assert steps[0].request_bytes == 244 * GIB
    assert [round(step.factor) for step in steps] == [1, 25, 51, 337]


@pytest.mark.parametrize("rate", [-0.1, 1.0])
def test_impossible_hit_rates_are_refused(rate: float) -> None:
    with pytest.raises(ValueError, match="prefix_hit_rate"):
        layers_of_saving(V4, 1024, KvPrecision.FP8, rate)


def test_prefetch_of_a_block_range_hides_behind_decoding() -> None:
    """4,096 tokens of 320 KB from a 14 GB/s drive: 96 ms, 93 from 1.3 GB as the source rounds it."""
    size = kv_bytes(MODELS["llama-3-70b"], 4096)
    assert size == pytest.approx(1.3e9, rel=0.035)
    assert load_s(size, POD_FLASH.typical) == pytest.approx(93e-3, rel=0.04)
    assert 1.3e9 / POD_FLASH.typical.bytes_per_s == pytest.approx(93e-3, rel=0.002)


def test_transfer_over_the_memory_pool_takes_what_mooncake_measured() -> None:
    assert load_s(40e9, MEMORY_POOL.typical) == pytest.approx(0.451, rel=0.03)


@pytest.mark.parametrize(("flops_per_s", "gb_per_s"), [(8 * 312e12, 6), (8 * 989e12, 19)])
def test_bandwidth_from_which_reuse_pays(flops_per_s: float, gb_per_s: int) -> None:
    """Mooncake (FAST'25): 6 GB/s on eight A800 and 19 on eight H800 for a prefix of 8,192 tokens."""
    bandwidth = reuse_bandwidth_bytes_per_s(MODELS["llama-3-70b"], flops_per_s, 8192)
    assert round(bandwidth / 1e9) == gb_per_s
