"""How long an engine's steps take: constants fitted to measured engines."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final


@dataclass(frozen=True, slots=True)
class PerformanceModel:
    """Seconds of prefill and decode steps of one model on one set of GPUs.

    Prefilling ``n`` tokens behind a prefix of ``p`` costs ``a*n + b*((p+n)^2 - p^2)``; a step costs
    ``c0 + c1*sequences + c2*context_tokens`` for its decodes plus the prefill of its chunks. A prefix taken
    from the cache costs ``cached_base_s + cached_s_per_token*p`` once. ``speed`` divides every duration.
    """

    name: str
    prefill_s_per_token: float  # a
    prefill_s_per_token_squared: float  # b
    step_base_s: float  # c0
    step_s_per_sequence: float  # c1
    step_s_per_context_token: float  # c2
    kv_bytes_per_token: int
    cached_base_s: float = 0.0
    cached_s_per_token: float = 0.0
    speed: float = 1.0

    def __post_init__(self) -> None:
        if not self.speed > 0:
            raise ValueError(f"speed must be positive, not {self.speed}")

    def at_speed(self, speed: float) -> PerformanceModel:
        """The same engine, ``speed`` times as fast."""
        return replace(self, speed=speed)

    def prefill_s(self, tokens: int, prefix_tokens: int = 0) -> float:
        """Seconds that ``tokens`` prompt tokens add to a step when ``prefix_tokens`` are already there."""
        total = prefix_tokens + tokens
        squared = total * total - prefix_tokens * prefix_tokens
        return (self.prefill_s_per_token * tokens + self.prefill_s_per_token_squared * squared) / self.speed

    def cached_prefix_s(self, tokens: int) -> float:
        """Seconds to take ``tokens`` tokens from the prefix cache; 0 for none."""
        return (self.cached_base_s + self.cached_s_per_token * tokens) / self.speed if tokens else 0.0

    def step_s(self, sequences: int, context_tokens: int, prefill_s: float = 0.0) -> float:
        """Seconds of a step that decodes ``sequences`` sequences over ``context_tokens`` tokens in total.

        ``prefill_s`` is the sum of the step's prefill parts, already divided by the speed.
        """
        decode_s = self.step_s_per_sequence * sequences + self.step_s_per_context_token * context_tokens
        return (self.step_base_s + decode_s) / self.speed + prefill_s


# Llama-3.1-8B, bf16, one H100, from the measured-operator composites of AIConfigurator's vLLM tables.
# Prefill alone: 46k, 45k, 37k and 21k tokens/s at 1,024, 4,096, 16,384 and 65,536 tokens are met within
# +0.8, +4.3, +4.4 and +1.6 % by a*n + b*n^2; the engine adds c0 per step, which a measured prefill already
# contains, so a lone 1k prompt comes out 29 % slow and a 16k prompt 7 % slow. Decode steps of 6.2, 7.5, 10.4,
# 13.1, 28.6 and 18.1 ms (1x1k, 16x1k, 64x1k, 16x8k, 64x8k, 128x2k): errors -1, -4, +1, -8, +4 and +12 %.
LLAMA_8B_H100: Final = PerformanceModel(
    name="llama-3.1-8b-h100",
    prefill_s_per_token=2.15e-5,
    prefill_s_per_token_squared=4.1e-10,
    step_base_s=6.1e-3,
    step_s_per_sequence=2.5e-5,
    step_s_per_context_token=4.2e-8,
    kv_bytes_per_token=131_072,
)

# LLaMA-3-70B on eight A800, as in the Mooncake paper (FAST'25): prefill fitted to Figure 14a within 0.6 %
# (8k to 128k tokens); the cached-prefix terms were read off Figure 14b by eye; 26.5 ms a token at batch 1.
# The growth with batch and context is that of Llama-70B on eight A100 in AIConfigurator's tables
# (least squares over six points, 3 % mean error). c0 adds 2.8 % to an 8k prefill.
LLAMA_70B_8XA800: Final = PerformanceModel(
    name="llama3-70b-8xa800",
    prefill_s_per_token=1.1045e-4,
    prefill_s_per_token_squared=7.4975e-10,
    step_base_s=26.5e-3,
    step_s_per_sequence=5.8e-5,
    step_s_per_context_token=2.5e-8,
    kv_bytes_per_token=327_680,
    cached_base_s=0.075,
    cached_s_per_token=2.0e-6,
)

PROFILES: Final[dict[str, PerformanceModel]] = {
    profile.name: profile for profile in (LLAMA_8B_H100, LLAMA_70B_8XA800)
}
