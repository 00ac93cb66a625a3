"""Models: their shapes, what a token of context occupies, and what their weights occupy.

Shapes are those of the models' published ``config.json``; parameters are counted from the shapes (normalisation
weights, biases and multi-token prediction heads are left out) and agree with the published totals within 2 %.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import Final

from conductor.catalogue.attention import (
    Attention,
    AttentionKind,
    AttentionLayers,
    GroupedQueryAttention,
    HybridCompressedAttention,
    Indexer,
    KvPrecision,
    LatentAttention,
    Matrix,
    Split,
)


class WeightPrecision(Enum):
    BF16 = "bf16"
    FP8 = "fp8"
    INT4 = "int4"
    FP4 = "fp4"  # NVFP4: a scale byte per 16 weights
    FP4_EXPERTS = "fp4-experts"  # routed experts FP4 with a scale byte per 32 weights, the rest FP8

    @property
    def weight_bytes(self) -> float:
        """Of one weight outside the routed experts."""
        return {"bf16": 2.0, "fp8": 1.0, "int4": 0.5, "fp4": 0.5 + 1 / 16, "fp4-experts": 1.0}[self.value]

    @property
    def expert_weight_bytes(self) -> float:
        return 0.5 + 1 / 32 if self is WeightPrecision.FP4_EXPERTS else self.weight_bytes


@dataclass(frozen=True, slots=True)
class Experts:
    """The mixture of experts in a model's sparse layers."""

    routed: int
    active: int  # routed experts that a token visits
    shared: int  # experts that every token visits
    intermediate_size: int  # of one expert
    dense_layers: int  # first layers that have an ordinary MLP instead


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder-only transformer with gated MLPs (three matrices)."""

    name: str
    layers: int
    hidden_size: int
    intermediate_size: int  # of a dense layer's MLP
    vocabulary: int
    attention: Attention
    max_context_tokens: int
    source: str
    experts: Experts | None = None
    stated_weights_bytes: float | None = None  # where a source gives a size instead of a shape

    @property
    def kind(self) -> AttentionKind:
        return self.attention.kind

    @property
    def attention_layers(self) -> tuple[AttentionLayers, ...]:
        return self.attention.layers(self.layers, self.hidden_size)

    @property
    def dense_layers(self) -> int:
        return self.experts.dense_layers if self.experts else self.layers

    @property
    def sparse_layers(self) -> int:
        return self.layers - self.dense_layers

    def mlp(self, intermediate_size: int) -> tuple[Matrix, Matrix]:
        """Gate and up projection in one, and down projection."""
        return (
            Matrix(self.hidden_size, 2 * intermediate_size, Split.OUTPUTS),
            Matrix(intermediate_size, self.hidden_size, Split.INPUTS),
        )

    @property
    def output_layer(self) -> Matrix:
        return Matrix(self.hidden_size, self.vocabulary, Split.OUTPUTS)

    def expert_parameters(self) -> int:
        """Of one expert in one layer; 0 for a dense model."""
        return 3 * self.hidden_size * self.experts.intermediate_size if self.experts else 0


def total_parameters(model: ModelSpec) -> int:
    """All weights, embeddings and output layer included."""
    routed = model.experts.routed if model.experts else 0
    return (
        _parameters_outside_routed_experts(model) + model.sparse_layers * routed * model.expert_parameters()
    )


def active_parameters(model: ModelSpec) -> int:
    """Weights that one token passes through; the input embedding, a look-up, counts."""
    active = model.experts.active if model.experts else 0
    return (
        _parameters_outside_routed_experts(model) + model.sparse_layers * active * model.expert_parameters()
    )


def _parameters_outside_routed_experts(model: ModelSpec) -> int:
    attention = sum(g.count * sum(m.parameters for m in g.matrices) for g in model.attention_layers)
    dense = model.dense_layers * 3 * model.hidden_size * model.intermediate_size
    sparse = 0
    if model.experts:
        router = model.hidden_size * model.experts.routed
        sparse = model.sparse_layers * (model.experts.shared * model.expert_parameters() + router)
    return attention + dense + sparse + 2 * model.vocabulary * model.hidden_size


def weights_bytes(model: ModelSpec, precision: WeightPrecision) -> float:
    """What the weights occupy, over all GPUs, when nothing is replicated."""
    if model.stated_weights_bytes is not None:
        return model.stated_weights_bytes
    outside = _parameters_outside_routed_experts(model)
    experts = total_parameters(model) - outside
    return outside * precision.weight_bytes + experts * precision.expert_weight_bytes


def kv_bytes(model: ModelSpec, context_tokens: float, precision: KvPrecision = KvPrecision.BF16) -> float:
    """Bytes of KV cache of one sequence of ``context_tokens`` tokens, all layers, one copy.

    Scales of quantised formats are left out. For hybrid attention, entries of partly filled compression groups
    count in proportion, and the sliding window is full from 128 tokens on: short contexts cost more per token
    than long ones.
    """
    return sum(group.kv_bytes(context_tokens, precision) for group in model.attention_layers)


def kv_bytes_per_token(model: ModelSpec, precision: KvPrecision = KvPrecision.BF16) -> float:
    """Bytes that one more token adds to a long context; exact for every kind but hybrid.

    For hybrid attention this leaves out the sliding window, which costs the same at every length (7.6 MiB of
    BF16 for DeepSeek-V4-Pro: 2.5 % at 32K tokens, 0.08 % at 1M).
    """
    return sum(
        group.count
        / group.compression
        * (group.entry_bytes(precision) + group.indexer_entry_bytes(precision))
        for group in model.attention_layers
    )


LLAMA_3_1_8B: Final = ModelSpec(
    name="llama-3.1-8b",
    layers=32,
    hidden_size=4096,
    intermediate_size=14_336,
    vocabulary=128_256,
    attention=GroupedQueryAttention(query_heads=32, kv_heads=8, head_size=128),
    max_context_tokens=131_072,
    source="meta-llama/Meta-Llama-3.1-8B config.json",
)

LLAMA_3_70B: Final = ModelSpec(
    name="llama-3-70b",
    layers=80,
    hidden_size=8192,
    intermediate_size=28_672,
    vocabulary=128_256,
    attention=GroupedQueryAttention(query_heads=64, kv_heads=8, head_size=128),
    max_context_tokens=131_072,  # of 3.1 and 3.3; 8,192 of 3.0
    source="meta-llama/Meta-Llama-3.1-70B config.json",
)

QWEN3_32B: Final = ModelSpec(
    name="qwen3-32b",
    layers=64,
    hidden_size=5120,
    intermediate_size=25_600,
    vocabulary=151_936,
    attention=GroupedQueryAttention(query_heads=64, kv_heads=8, head_size=128),
    max_context_tokens=40_960,
    source="Qwen/Qwen3-32B config.json",
)

QWEN3_30B_A3B: Final = ModelSpec(
    name="qwen3-30b-a3b",
    layers=48,
    hidden_size=2048,
    intermediate_size=6144,
    vocabulary=151_936,
    attention=GroupedQueryAttention(query_heads=32, kv_heads=4, head_size=128),
    max_context_tokens=40_960,
    source="Qwen/Qwen3-30B-A3B config.json",
    experts=Experts(routed=128, active=8, shared=0, intermediate_size=768, dense_layers=0),
)

DEEPSEEK_V3: Final = ModelSpec(
    name="deepseek-v3",
    layers=61,
    hidden_size=7168,
    intermediate_size=18_432,
    vocabulary=129_280,
    attention=LatentAttention(
        query_heads=128, latent_size=512, rotary_size=64, query_rank=1536, key_size=128, value_size=128
    ),
    max_context_tokens=163_840,
    source="deepseek-ai/DeepSeek-V3 config.json; DeepSeek-R1 has the same shape",
    experts=Experts(routed=256, active=8, shared=1, intermediate_size=2048, dense_layers=3),
)

DEEPSEEK_V4_PRO: Final = ModelSpec(
    name="deepseek-v4-pro",
    layers=61,
    hidden_size=7168,
    intermediate_size=3072,  # no dense layers
    vocabulary=129_280,
    attention=HybridCompressedAttention(
        query_heads=128,
        head_size=512,
        rotary_size=64,
        query_rank=1536,
        output_rank=1024,
        output_groups=16,
        c4a_layers=30,
        c128a_layers=31,
        window_tokens=128,
        indexer=Indexer(heads=64, head_size=128, top_k=1024),
    ),
    max_context_tokens=1_048_576,
    source="deepseek-ai/DeepSeek-V4-Pro config.json; storage as in vLLM's DeepSeek-V4 post of 24 April 2026",
    experts=Experts(routed=384, active=6, shared=1, intermediate_size=3072, dense_layers=0),
)

GLM_5_2: Final = ModelSpec(
    name="glm-5.2",
    layers=78,
    hidden_size=6144,
    intermediate_size=12_288,
    vocabulary=154_880,
    attention=LatentAttention(
        query_heads=64,
        latent_size=512,
        rotary_size=64,
        query_rank=2048,
        key_size=192,
        value_size=256,
        indexer=Indexer(heads=32, head_size=128, top_k=2048),
        indexer_layers=21,
    ),
    max_context_tokens=1_048_576,
    source="zai-org/GLM-5.2 config.json",
    experts=Experts(routed=256, active=8, shared=1, intermediate_size=2048, dense_layers=3),
)

GLM_5_2_ESTIMATE: Final = replace(
    GLM_5_2,
    name="glm-5.2-estimate",
    layers=80,
    attention=GroupedQueryAttention(query_heads=64, kv_heads=8, head_size=128),
    source="survey of June 2026, an estimate made before the configuration was known: GQA 8 x 128, 80 layers, "
    "170 GB; for comparing with the survey's figures only",
    stated_weights_bytes=170e9,
)

KIMI_K2: Final = ModelSpec(
    name="kimi-k2",
    layers=61,
    hidden_size=7168,
    intermediate_size=18_432,
    vocabulary=163_840,
    attention=LatentAttention(
        query_heads=64, latent_size=512, rotary_size=64, query_rank=1536, key_size=128, value_size=128
    ),
    max_context_tokens=131_072,
    source="moonshotai/Kimi-K2-Instruct config.json",
    experts=Experts(routed=384, active=8, shared=1, intermediate_size=2048, dense_layers=1),
)

MHA_70B: Final = replace(
    LLAMA_3_70B,
    name="mha-70b",
    attention=GroupedQueryAttention(query_heads=64, kv_heads=64, head_size=128),
    source="Llama-3-70B with as many KV heads as query heads: what GQA saves, not a published model",
)

MODELS: Final[dict[str, ModelSpec]] = {
    model.name: model
    for model in (
        LLAMA_3_1_8B,
        LLAMA_3_70B,
        QWEN3_32B,
        QWEN3_30B_A3B,
        DEEPSEEK_V3,
        DEEPSEEK_V4_PRO,
        GLM_5_2,
        GLM_5_2_ESTIMATE,
        KIMI_K2,
        MHA_70B,
    )
}
