"""The configuration's `shared_state`: the Redis that several conductors share, and how they do."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator, model_validator

_SCHEMES = ("redis://", "rediss://", "unix://")
_RENEWALS = 3  # that fit into a lease


class SharedStateConfig(BaseModel):
    """Nothing is shared without a ``url``, which holds the password and is best given in the environment."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    url: SecretStr | None = None
    namespace: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")] = "conductor"
    replica: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")] | None = None  # else the host's name
    advertise_url: Annotated[str, Field(pattern=r"^https?://[^/\s]+/?$")] | None = None
    lease_s: Annotated[float, Field(ge=1, le=60)] = 3.0
    batch_s: Annotated[float, Field(ge=0.005, le=1)] = 0.03
    timeout_s: Annotated[float, Field(ge=0.05, le=20)] = 0.5

    @field_validator("url")
    @classmethod
    def _is_redis(cls, url: SecretStr | None) -> SecretStr | None:
        if url is not None and not url.get_secret_value().startswith(_SCHEMES):
            raise ValueError(
                f"must begin with one of {', '.join(_SCHEMES)}, as redis://:PASSWORD@HOST:6379/0"
            )
        return url

    @model_validator(mode="after")
    def _renewable(self) -> SharedStateConfig:
        if self.timeout_s * _RENEWALS > self.lease_s:
            raise ValueError(
                f"timeout_s ({self.timeout_s:g}) must be at most a third of lease_s ({self.lease_s:g}), "
                "or one slow answer loses the lease"
            )
        return self
