"""The kinds of attention a model can have, reduced to what they store per token and what they compute.

Every kind becomes one or two groups of equal layers (`AttentionLayers`), in which a token leaves
``entry_elements`` numbers behind per ``compression`` tokens, and a query attends to at most ``top_k`` of those
entries and to a window of recent, uncompressed ones. Sizes and the roofline both read these groups, so that a
new kind of attention is described once.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import numpy as np

from conductor.costs import Floats


class AttentionKind(Enum):
    MHA = "mha"  # every query head has its own keys and values
    GQA = "gqa"  # groups of query heads share them
    MLA = "mla"  # one latent vector and one rotary key for all heads
    HYBRID = "hybrid"  # latent vectors compressed along the sequence, at two ratios, with a sliding window


class KvPrecision(Enum):
    """How KV entries are stored."""

    BF16 = "bf16"
    FP16 = "fp16"
    FP8 = "fp8"
    INT4 = "int4"
    FP8_FP4_INDEXER = "fp8+fp4-indexer"  # DeepSeek-V4: attention entries FP8, the indexer's keys FP4

    @property
    def element_bytes(self) -> float:
        return _ELEMENT_BYTES[self]

    @property
    def indexer_element_bytes(self) -> float:
        return 0.5 if self is KvPrecision.FP8_FP4_INDEXER else self.element_bytes


_ELEMENT_BYTES = {
    KvPrecision.BF16: 2.0,
    KvPrecision.FP16: 2.0,
    KvPrecision.FP8: 1.0,
    KvPrecision.INT4: 0.5,
    KvPrecision.FP8_FP4_INDEXER: 1.0,
}


class Split(Enum):
    """Which side of a weight matrix tensor parallelism divides."""

    INPUTS = "inputs"
    OUTPUTS = "outputs"
    NONE = "none"  # every GPU has all of it


@dataclass(frozen=True, slots=True)
class Matrix:
    """A linear layer's weights."""

    inputs: int
    outputs: int
    split: Split

    @property
    def parameters(self) -> int:
        return self.inputs * self.outputs

    def shard(self, tensor_parallel: int) -> tuple[float, float]:
        """Inputs and outputs on one of ``tensor_parallel`` GPUs."""
        inputs, outputs = float(self.inputs), float(self.outputs)
        if self.split is Split.INPUTS:
            inputs /= tensor_parallel
        elif self.split is Split.OUTPUTS:
            outputs /= tensor_parallel
        return inputs, outputs


@dataclass(frozen=True, slots=True)
class Indexer:
    """Scores all (compressed) entries cheaply and selects those that a query attends to."""

    heads: int
    head_size: int
    top_k: int


@dataclass(frozen=True, slots=True)
class AttentionLayers:
    """``count`` layers with the same attention."""

    count: int
    matrices: tuple[Matrix, ...]
    entry_elements: int  # numbers stored per entry, keys and values together
    rotary_elements: int  # of those, always kept in BF16
    kv_shards: int  # GPUs that an entry can be divided over; 1 when every GPU stores all of it
    prefill_flops_per_pair: int  # of one query token and one entry, all heads
    decode_flops_per_pair: int
    compression: int = 1  # tokens per entry
    window_tokens: int = 0  # recent tokens also stored, and attended to, uncompressed
    indexer: Indexer | None = None

    def entry_bytes(self, precision: KvPrecision) -> float:
        elements = self.entry_elements - self.rotary_elements
        return elements * precision.element_bytes + self.rotary_elements * 2.0

    def indexer_entry_bytes(self, precision: KvPrecision) -> float:
        return self.indexer.head_size * precision.indexer_element_bytes if self.indexer else 0.0

    def kv_bytes(self, context_tokens: float, precision: KvPrecision) -> float:
        """Bytes that one sequence of ``context_tokens`` tokens occupies in all these layers."""
        entries = context_tokens / self.compression
        window = min(self.window_tokens, context_tokens)
        entry_bytes, indexer_bytes = self.entry_bytes(precision), self.indexer_entry_bytes(precision)
        return self.count * (entries * (entry_bytes + indexer_bytes) + window * entry_bytes)

    def attended_entries(self, context_tokens: Floats) -> Floats:
        """Entries that one query reads in one of these layers after ``context_tokens`` tokens (any shape)."""
        entries = context_tokens / self.compression
        if self.indexer:
            entries = np.minimum(entries, self.indexer.top_k)
        return entries + np.minimum(self.window_tokens, context_tokens)


class Attention(Protocol):
    """A kind of attention with its dimensions."""

    @property
    def kind(self) -> AttentionKind: ...

    def layers(self, count: int, hidden_size: int) -> tuple[AttentionLayers, ...]:
        """The groups of equal layers of a model of ``count`` layers."""
        ...


@dataclass(frozen=True, slots=True)
class GroupedQueryAttention:
    """MHA when there are as many KV heads as query heads; KV: 2 x heads x size numbers a token and layer."""

    query_heads: int
    kv_heads: int
    head_size: int

    @property
    def kind(self) -> AttentionKind:
        return AttentionKind.MHA if self.kv_heads == self.query_heads else AttentionKind.GQA

    def layers(self, count: int, hidden_size: int) -> tuple[AttentionLayers, ...]:
        queries = self.query_heads * self.head_size
        entry = 2 * self.kv_heads * self.head_size
        flops = 4 * queries
        matrices = (
            Matrix(hidden_size, queries + entry, Split.OUTPUTS),
            Matrix(queries, hidden_size, Split.INPUTS),
        )
        return (AttentionLayers(count, matrices, entry, 0, self.kv_heads, flops, flops),)


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """MLA of DeepSeek-V2 and later: one latent vector and one rotary key a token and layer.

    Prefill expands the latents to full heads, decode multiplies queries into the latent space instead, which
    costs more arithmetic but reads only the latents (DeepSeek-V2 report, section 2.1). ``indexer`` is that of
    DeepSeek Sparse Attention, present in ``indexer_layers`` layers; the others share its selection.
    """

    query_heads: int
    latent_size: int
    rotary_size: int
    query_rank: int
    key_size: int  # of a head, without the rotary part
    value_size: int
    indexer: Indexer | None = None
    indexer_layers: int = 0

    @property
    def kind(self) -> AttentionKind:
        return AttentionKind.MLA

    def layers(self, count: int, hidden_size: int) -> tuple[AttentionLayers, ...]:
        heads, entry = self.query_heads, self.latent_size + self.rotary_size
        matrices = (
            Matrix(hidden_size, self.query_rank + entry, Split.NONE),
            Matrix(self.query_rank, heads * (self.key_size + self.rotary_size), Split.OUTPUTS),
            Matrix(self.latent_size, heads * (self.key_size + self.value_size), Split.OUTPUTS),
            Matrix(heads * self.value_size, hidden_size, Split.INPUTS),
        )
        prefill_flops = 2 * heads * (self.key_size + self.rotary_size + self.value_size)
        decode_flops = 2 * heads * (entry + self.latent_size)

        def group(layers: int, extra: tuple[Matrix, ...], indexer: Indexer | None) -> AttentionLayers:
            every = (*matrices, *extra)
            return AttentionLayers(layers, every, entry, 0, 1, prefill_flops, decode_flops, indexer=indexer)

        if self.indexer is None:
            return (group(count, (), None),)
        own = _indexer_matrices(self.indexer, self.query_rank, hidden_size, key_projections=1)
        # A layer that shares a selection attends as sparsely, but stores and scores no keys of its own.
        sharing = Indexer(heads=0, head_size=0, top_k=self.indexer.top_k)
        return (
            group(self.indexer_layers, own, self.indexer),
            group(count - self.indexer_layers, (), sharing),
        )


@dataclass(frozen=True, slots=True)
class HybridCompressedAttention:
    """DeepSeek-V4: keys are the values (2x), layers store one entry per 4 or per 128 tokens, and a window.

    c4a layers select among their entries with an indexer whose keys are stored too; c128a layers attend to all
    of theirs. The window of recent tokens is stored uncompressed in every layer. Rotary dimensions stay in BF16
    when entries are FP8 (DeepSeek-V4 report). Compressor state (a few tokens a layer) is left out.
    """

    query_heads: int
    head_size: int
    rotary_size: int
    query_rank: int
    output_rank: int
    output_groups: int
    c4a_layers: int
    c128a_layers: int
    window_tokens: int
    indexer: Indexer

    @property
    def kind(self) -> AttentionKind:
        return AttentionKind.HYBRID

    def layers(self, count: int, hidden_size: int) -> tuple[AttentionLayers, ...]:
        if self.c4a_layers + self.c128a_layers != count:
            raise ValueError(
                f"{self.c4a_layers} c4a and {self.c128a_layers} c128a layers do not make {count} layers"
            )
        queries = self.query_heads * self.head_size
        matrices = (
            Matrix(hidden_size, self.query_rank + self.head_size, Split.NONE),
            Matrix(self.query_rank, queries, Split.OUTPUTS),
            Matrix(queries, self.output_rank, Split.INPUTS),
            Matrix(self.output_groups * self.output_rank, hidden_size, Split.INPUTS),
        )
        own = _indexer_matrices(self.indexer, self.query_rank, hidden_size, key_projections=4)

        def group(
            layers: int, ratio: int, overlap: int, extra: tuple[Matrix, ...], indexer: Indexer | None
        ) -> AttentionLayers:
            # Keys and gates of the compressor; a c4a block also looks at the block before it.
            compressor = Matrix(hidden_size, 2 * overlap * self.head_size, Split.NONE)
            return AttentionLayers(
                count=layers,
                matrices=(*matrices, compressor, *extra),
                entry_elements=self.head_size,
                rotary_elements=self.rotary_size,
                kv_shards=1,
                prefill_flops_per_pair=4 * queries,
                decode_flops_per_pair=4 * queries,
                compression=ratio,
                window_tokens=self.window_tokens,
                indexer=indexer,
            )

        return (
            group(self.c4a_layers, 4, 2, own, self.indexer),
            group(self.c128a_layers, 128, 1, (), None),
        )


def _indexer_matrices(
    indexer: Indexer, query_rank: int, hidden_size: int, *, key_projections: int
) -> tuple[Matrix, ...]:
    return (
        Matrix(query_rank, indexer.heads * indexer.head_size, Split.NONE),
        Matrix(hidden_size, key_projections * indexer.head_size + indexer.heads, Split.NONE),
    )
