"""Figures of one deployment that replace those of its catalogue entry, from the configuration."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

from cache_index import Tier
from conductor.codec_config import CodecConfig
from conductor.costs import InstanceClass, Speed

_Positive = Annotated[float, Field(gt=0)]
_NotNegative = Annotated[float, Field(ge=0)]
_LINKS = ("nic", "tiers")


class LinkSpeed(BaseModel):
    """Of the network card."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    bytes_per_s: _Positive
    latency_s: _NotNegative = 0.0

    def speed(self) -> Speed:
        return Speed(self.bytes_per_s, self.latency_s)


class TierSpeed(LinkSpeed):
    """Of loading from a tier, whose store may encode what it holds."""

    codec: CodecConfig | None = None

    def speed(self) -> Speed:
        return Speed(self.bytes_per_s, self.latency_s, None if self.codec is None else self.codec.codec())


class InstanceSpeeds(BaseModel):
    """What differs from the catalogue; see `InstanceClass` for the meaning of each figure."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    prefill_s_per_token: _NotNegative | None = None
    prefill_s_per_token_squared: _NotNegative | None = None
    prefill_base_s: _NotNegative | None = None
    prefill_s_per_cached_token: _NotNegative | None = None
    decode_base_s: _NotNegative | None = None
    decode_s_per_sequence: _NotNegative | None = None
    decode_s_per_context_token: _NotNegative | None = None
    kv_bytes_per_token: _Positive | None = None
    layers: Annotated[int, Field(gt=0)] | None = None
    chunk_tokens: Annotated[int, Field(gt=0)] | None = None
    kv_capacity_tokens: Annotated[int, Field(gt=0)] | None = None
    nic: LinkSpeed | None = None
    tiers: dict[str, TierSpeed] = {}

    @field_validator("tiers")
    @classmethod
    def _known_tiers(cls, tiers: dict[str, TierSpeed]) -> dict[str, TierSpeed]:
        known = [tier.name.lower() for tier in Tier if tier is not Tier.DEVICE]
        for name in tiers:
            if name not in known:
                raise ValueError(f"unknown tier {name!r}; known: {', '.join(known)}")
        return tiers

    def applied_to(self, instance_class: InstanceClass) -> InstanceClass:
        """A class of its own, which learns its own corrections; the same figures make the same class."""
        given: dict[str, Any] = {
            name: value
            for name in type(self).model_fields
            if name not in _LINKS and (value := getattr(self, name)) is not None
        }
        if self.nic is not None:
            given["nic"] = self.nic.speed()
        if self.tiers:
            own = {Tier[name.upper()]: link.speed() for name, link in self.tiers.items()}
            given["tiers"] = {**instance_class.tiers, **own}
        if not given:
            return instance_class
        digest = hashlib.sha256(self.model_dump_json(exclude_none=True).encode()).hexdigest()[:6]
        return replace(instance_class, name=f"{instance_class.name}+{digest}", **given)
