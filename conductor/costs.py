"""The cost model: every estimate of the scheduler, in seconds, comes from here.

Prefill of ``n`` prompt tokens of which ``p`` are cached takes
``a(n-p) + b(n^2-p^2) + c + d*p`` (quadratic because attention is), decode steps are affine in batch size and
total context, and a hand-off moves bytes over a link. The constants of a class of instances come from the
catalogue below and are corrected online by one observed scale factor (`PrefillCalibration`).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class InstanceClass:
    """Speed and size of one kind of instance: a model on a set of GPUs."""

    name: str
    prefill_s_per_token: float  # a
    prefill_s_per_token_squared: float  # b
    prefill_base_s: float  # c
    prefill_s_per_cached_token: float  # d
    decode_base_s: float
    decode_s_per_sequence: float
    decode_s_per_context_token: float
    kv_bytes_per_token: int
    link_bytes_per_s: float
    link_latency_s: float

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
        seconds = self.link_latency_s + tokens * (self.kv_bytes_per_token / self.link_bytes_per_s)
        return np.where(tokens > 0, seconds, 0.0)


# Llama-3.1-8B, bf16, one H100, from measured-operator composites of AIConfigurator's vLLM tables:
# prefill 46k/45k/37k/21k tokens/s at 1k/4k/16k/64k tokens; decode step 6.2 ms (1 x 1k), 7.5 (16 x 1k),
# 10.4 (64 x 1k), 13.1 (16 x 8k), 28.6 (64 x 8k), 18.1 (128 x 2k). KV: 2 x 32 layers x 8 heads x 128 x 2 bytes.
# Link: one 200 Gb/s RDMA NIC.
LLAMA_8B_H100: Final = InstanceClass(
    name="llama-3.1-8b-h100",
    prefill_s_per_token=2.15e-5,
    prefill_s_per_token_squared=4.1e-10,
    prefill_base_s=6.1e-3,
    prefill_s_per_cached_token=0.0,
    decode_base_s=6.1e-3,
    decode_s_per_sequence=2.5e-5,
    decode_s_per_context_token=4.2e-8,
    kv_bytes_per_token=131_072,
    link_bytes_per_s=25e9,
    link_latency_s=1e-3,
)

# LLaMA-3-70B, bf16, eight A800: fitted to Mooncake (FAST'25) Figure 14a within 0.6 %, cached-prefix terms by
# eye on Figure 14b; transfer 87 GB/s (Figure 12); decode 26.5 to 30 ms a token at batch 1; KV 320 KB a token.
LLAMA_70B_8XA800: Final = InstanceClass(
    name="llama3-70b-8xa800",
    prefill_s_per_token=1.1045e-4,
    prefill_s_per_token_squared=7.4975e-10,
    prefill_base_s=0.075,
    prefill_s_per_cached_token=2.0e-6,
    decode_base_s=26.5e-3,
    decode_s_per_sequence=5.0e-5,
    decode_s_per_context_token=2.7e-8,
    kv_bytes_per_token=327_680,
    link_bytes_per_s=87e9,
    link_latency_s=1e-3,
)

CATALOGUE: Final[dict[str, InstanceClass]] = {c.name: c for c in (LLAMA_8B_H100, LLAMA_70B_8XA800)}


class PrefillCalibration:
    """One scale factor for the predicted prefill time of an instance class, learned from observed times.

    An exponential average of observed / predicted, each ratio clipped so that an outlier (a stall, a cold
    start) moves it by a bounded step; the factor itself stays within [1/16, 16].
    """

    LIMIT: Final = 16.0
    WEIGHT: Final = 0.05
    OUTLIER: Final = 4.0
    # Shorter prefills are dominated by HTTP and step granularity and say little about the slope.
    MIN_PREDICTED_S: Final = 2e-3

    __slots__ = ("observations", "scale")

    def __init__(self, scale: float = 1.0, observations: int = 0) -> None:
        self.scale = scale
        self.observations = observations

    def observe(self, predicted_s: float, observed_s: float) -> None:
        """Learn from one prefill: ``predicted_s`` is the estimate with the scale of that moment."""
        if predicted_s < self.MIN_PREDICTED_S:
            return
        ratio = min(max(observed_s / predicted_s, 1 / self.OUTLIER), self.OUTLIER)
        self.observations += 1
        # The first observations count as a plain average, so that a wrong catalogue entry is left quickly.
        weight = max(self.WEIGHT, 1.0 / (self.observations + 1))
        corrected = self.scale * (1.0 + weight * (ratio - 1.0))
        self.scale = min(max(corrected, 1 / self.LIMIT), self.LIMIT)


def dump_calibrations(calibrations: dict[str, PrefillCalibration]) -> bytes:
    """The learned factors by instance class, for `load_calibrations`."""
    return json.dumps(
        {name: {"scale": c.scale, "observations": c.observations} for name, c in calibrations.items()}
    ).encode()


def load_calibrations(saved: bytes) -> dict[str, PrefillCalibration]:
    """Raises ValueError when ``saved`` was not written by `dump_calibrations`."""
    try:
        entries = json.loads(saved).items()
        loaded = {
            str(name): PrefillCalibration(float(e["scale"]), int(e["observations"])) for name, e in entries
        }
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"not a saved calibration: {error!r}") from None
    limit = PrefillCalibration.LIMIT
    for name, calibration in loaded.items():
        if not 1 / limit <= calibration.scale <= limit or calibration.observations < 0:
            raise ValueError(f"the calibration of {name!r} is out of bounds")
    return loaded
