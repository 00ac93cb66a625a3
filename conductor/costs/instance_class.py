"""What is known of one kind of instance, a model on a set of GPUs: speeds and sizes that estimates rest on.

Prefill of ``n`` prompt tokens of which ``p`` are cached takes ``a(n-p) + b(n^2-p^2) + c + d*p`` (quadratic
because attention is); decode steps are affine in batch size and total context; moving KV blocks takes a latency
and bytes over a link. Constants come from `conductor.catalogue` and are corrected online (`calibration`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from cache_index import Tier

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Codec:
    """How a tier's store encodes all that it holds; throughputs are those of one instance, in bytes of raw KV."""

    ratio: float  # bytes of raw KV by bytes stored
    encode_bytes_per_s: float
    decode_bytes_per_s: float

    def __post_init__(self) -> None:
        if not self.ratio >= 1.0:
            raise ValueError(f"a codec's ratio is raw bytes by stored ones, at least 1, not {self.ratio}")
        if not (self.encode_bytes_per_s > 0.0 and self.decode_bytes_per_s > 0.0):
            raise ValueError("a codec's throughputs must be positive")


@dataclass(frozen=True, slots=True)
class Speed:
    """Of a link, or of loading from a tier: what one transfer costs while nothing else uses it.

    What travels to and from a tier with a ``codec`` is encoded. It is coded chunk by chunk beside the transfer,
    so the slower of the two counts.
    """

    bytes_per_s: float
    latency_s: float
    codec: Codec | None = None

    @property
    def ratio(self) -> float:
        """Bytes of raw KV by bytes that travel."""
        return 1.0 if self.codec is None else self.codec.ratio

    @property
    def load_bytes_per_s(self) -> float:
        """Of raw KV, decoded."""
        if self.codec is None:
            return self.bytes_per_s
        return min(self.bytes_per_s * self.codec.ratio, self.codec.decode_bytes_per_s)

    @property
    def store_bytes_per_s(self) -> float:
        """Of raw KV, encoded on its way there."""
        if self.codec is None:
            return self.bytes_per_s
        return min(self.bytes_per_s * self.codec.ratio, self.codec.encode_bytes_per_s)


@dataclass(frozen=True, slots=True)
class InstanceClass:
    """Speed and size of one kind of instance."""

    name: str
    prefill_s_per_token: float  # a
    prefill_s_per_token_squared: float  # b
    prefill_base_s: float  # c
    prefill_s_per_cached_token: float  # d
    decode_base_s: float
    decode_s_per_sequence: float
    decode_s_per_context_token: float
    kv_bytes_per_token: float
    layers: int  # a transfer that streams layer by layer hides behind the others' compute
    chunk_tokens: int  # prompt tokens that one engine step takes at most
    kv_capacity_tokens: int  # of the device tier, until an engine reports its own
    nic: Speed  # to other instances, the whole instance's
    tiers: Mapping[Tier, Speed] = field(default_factory=dict)  # loading into the device from its other tiers

    def stored_bytes_per_token(self, tier: Tier) -> float:
        """Of KV as a tier's store holds it."""
        speed = self.tiers.get(tier)
        return self.kv_bytes_per_token if speed is None else self.kv_bytes_per_token / speed.ratio

    def prefill_s(self, prompt_tokens: int, cached_tokens: Ints) -> Floats:
        """Seconds to prefill, for each cached length in ``cached_tokens`` (any shape)."""
        n, p = float(prompt_tokens), cached_tokens.astype(np.float64)
        return (
            self.prefill_s_per_token * (n - p)
            + self.prefill_s_per_token_squared * (n * n - p * p)
            + self.prefill_base_s
            + self.prefill_s_per_cached_token * p
        )

    def decode_step_s(self, sequences: Ints, context_tokens: Ints) -> Floats:
        """Seconds of one decode step of ``sequences`` requests over ``context_tokens`` tokens in total."""
        return (
            self.decode_base_s
            + self.decode_s_per_sequence * sequences.astype(np.float64)
            + self.decode_s_per_context_token * context_tokens.astype(np.float64)
        )

    def hand_off_s(self, tokens: Ints) -> Floats:
        """Seconds to move the KV cache of ``tokens`` tokens to another instance; 0 for none."""
        seconds = self.nic.latency_s + tokens * (self.kv_bytes_per_token / self.nic.bytes_per_s)
        return np.where(tokens > 0, seconds, 0.0)
