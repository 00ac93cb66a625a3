"""How long an engine's steps take: the constants of an instance class, as the emulated engine spends them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final

from cache_index import Tier
from conductor.catalogue import INSTANCE_CLASSES, LLAMA_8B_H100
from conductor.catalogue.tiers import HOST_DRAM
from conductor.costs import InstanceClass


@dataclass(frozen=True, slots=True)
class PerformanceModel:
    """Seconds of prefill and decode steps of one model on one set of GPUs.

    Prefilling ``n`` tokens behind a prefix of ``p`` costs ``a*n + b*((p+n)^2 - p^2)``; a step costs
    ``c0 + c1*sequences + c2*context_tokens`` for its decodes plus the prefill of its chunks. A prefix taken
    from the cache costs ``cached_base_s + cached_s_per_token*p`` once; one that comes from the host's memory
    ``host_base_s + host_s_per_token*p`` before. ``speed`` divides every duration.
    """

    name: str
    prefill_s_per_token: float  # a
    prefill_s_per_token_squared: float  # b
    step_base_s: float  # c0
    step_s_per_sequence: float  # c1
    step_s_per_context_token: float  # c2
    kv_bytes_per_token: float
    cached_base_s: float = 0.0
    cached_s_per_token: float = 0.0
    speed: float = 1.0
    host_base_s: float = 0.0
    host_s_per_token: float = 0.0

    def __post_init__(self) -> None:
        if not self.speed > 0:
            raise ValueError(f"speed must be positive, not {self.speed}")

    @classmethod
    def of(cls, instance_class: InstanceClass) -> PerformanceModel:
        """The engine of an instance class.

        A prefill's base is the step it runs in; what it has beyond a step is spent on prefixes from the cache.
        """
        host = instance_class.tiers.get(Tier.HOST) or HOST_DRAM.typical
        return cls(
            name=instance_class.name,
            prefill_s_per_token=instance_class.prefill_s_per_token,
            prefill_s_per_token_squared=instance_class.prefill_s_per_token_squared,
            step_base_s=instance_class.decode_base_s,
            step_s_per_sequence=instance_class.decode_s_per_sequence,
            step_s_per_context_token=instance_class.decode_s_per_context_token,
            kv_bytes_per_token=instance_class.kv_bytes_per_token,
            cached_base_s=max(instance_class.prefill_base_s - instance_class.decode_base_s, 0.0),
            cached_s_per_token=instance_class.prefill_s_per_cached_token,
            host_base_s=host.latency_s,
            host_s_per_token=instance_class.kv_bytes_per_token / host.load_bytes_per_s,
        )

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

    def host_load_s(self, tokens: int) -> float:
        """Seconds to bring ``tokens`` tokens from the host's memory to the device; 0 for none."""
        return (self.host_base_s + self.host_s_per_token * tokens) / self.speed if tokens else 0.0

    def step_s(self, sequences: int, context_tokens: int, prefill_s: float = 0.0) -> float:
        """Seconds of a step that decodes ``sequences`` sequences over ``context_tokens`` tokens in total.

        ``prefill_s`` is the sum of the step's prefill parts, already divided by the speed.
        """
        decode_s = self.step_s_per_sequence * sequences + self.step_s_per_context_token * context_tokens
        return (self.step_base_s + decode_s) / self.speed + prefill_s


class Profiles(Mapping[str, PerformanceModel]):
    """The engine of every instance class of the catalogue, by the class's name."""

    def __getitem__(self, name: str) -> PerformanceModel:
        return PerformanceModel.of(INSTANCE_CLASSES[name])

    def __contains__(self, name: object) -> bool:
        return name in INSTANCE_CLASSES

    def __iter__(self) -> Iterator[str]:
        return iter(INSTANCE_CLASSES)

    def __len__(self) -> int:
        return len(INSTANCE_CLASSES)


PROFILES: Final = Profiles()
DEFAULT_PROFILE: Final = PerformanceModel.of(LLAMA_8B_H100)
