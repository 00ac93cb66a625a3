"""A tier's codec as files have it: in the configuration, in profiles, and in cluster files of simulations."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from conductor.costs import Codec

_Throughput = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class CodecConfig(BaseModel):
    """See `Codec` for the meaning of each figure."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    ratio: Annotated[float, Field(ge=1, allow_inf_nan=False)]
    encode_bytes_per_s: _Throughput
    decode_bytes_per_s: _Throughput

    def codec(self) -> Codec:
        return Codec(self.ratio, self.encode_bytes_per_s, self.decode_bytes_per_s)
