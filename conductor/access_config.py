"""Who may use the front door and how much: the configuration's `api_keys`."""

from __future__ import annotations

from typing import Annotated

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    SecretStr,
    field_validator,
    model_validator,
)

_Limit = Annotated[int, Field(gt=0)]
_Name = Annotated[str, Field(pattern=r"^[\x21-\x7e]{1,128}$")]


def is_sendable_key(key: str) -> bool:
    """Whether it fits into a header field as one word."""
    return bool(key) and all("!" <= character <= "~" for character in key)


def _sendable(key: SecretStr) -> SecretStr:
    if not is_sendable_key(key.get_secret_value()):
        raise ValueError("must be printable ASCII without spaces, as a header can carry it")
    return key


SendableSecret = Annotated[SecretStr, AfterValidator(_sendable)]


class KeyLimitsConfig(BaseModel):
    """What one key may ask for; no limit where nothing is given."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    requests_per_minute: _Limit | None = None
    tokens_per_minute: _Limit | None = None
    concurrency: _Limit | None = None


class ApiKeyConfig(BaseModel):
    """A key of a client: the key itself, the environment variable that holds it, or its SHA-256."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: _Name
    key: SendableSecret | None = None
    key_env: Annotated[str, Field(min_length=1)] | None = None
    key_sha256: SecretStr | None = None
    tenant: _Name | None = None
    limits: KeyLimitsConfig = KeyLimitsConfig()
    models: Annotated[list[str], Field(min_length=1)] | None = None
    priority: Annotated[int, Field(ge=-8, le=8)] = 0
    admin: bool = False
    registers: bool = False

    @field_validator("key_sha256")
    @classmethod
    def _digest(cls, digest: SecretStr | None) -> SecretStr | None:
        if digest is not None:
            text = digest.get_secret_value()
            if len(text) != 64 or not set(text.lower()) <= set("0123456789abcdef"):
                raise ValueError("must be 64 hexadecimal digits, as of: printf %s KEY | sha256sum")
        return digest

    @model_validator(mode="after")
    def _one_source(self) -> ApiKeyConfig:
        if sum(source is not None for source in (self.key, self.key_env, self.key_sha256)) != 1:
            raise ValueError(f"the key {self.name!r} needs exactly one of key, key_env and key_sha256")
        return self


def check_names(keys: list[ApiKeyConfig]) -> None:
    """Raises ValueError for a name that is used twice."""
    names = [key.name for key in keys]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"api_keys: the name {name!r} is used more than once; names must be unique")
