"""The front door towards browsers, TLS and traces: `server.cors`, `server.tls`, `routing.engine_tls`, `tracing`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s,*@A-Z]+")
_Token = Annotated[str, Field(pattern=r"^[!#$%&'*+.^_`|~0-9A-Za-z-]+$")]


class CorsConfig(BaseModel):
    """Web pages that may call the front door from a browser."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    origins: Annotated[list[str], Field(min_length=1)]
    methods: Annotated[list[_Token], Field(min_length=1)] = ["GET", "POST"]
    headers: list[_Token] = ["*"]
    credentials: bool = False
    max_age_s: Annotated[int, Field(ge=0)] = 600

    @field_validator("origins", "methods", "headers", mode="before")
    @classmethod
    def _one_or_many(cls, given: Any) -> Any:
        return [given] if isinstance(given, str) else given

    @field_validator("origins")
    @classmethod
    def _as_browsers_say_it(cls, origins: list[str]) -> list[str]:
        for origin in origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise ValueError(
                    f"{origin!r} must be '*' or like https://chat.example.com: scheme and host in lower case, "
                    "a port where it is not the scheme's own, no path"
                )
        if "*" in origins and len(origins) > 1:
            raise ValueError("'*' stands for every origin; leave the others out, or '*'")
        return origins

    @model_validator(mode="after")
    def _whose_credentials(self) -> CorsConfig:
        if self.credentials and "*" in self.origins:
            raise ValueError(
                "credentials: true needs 'origins' to be listed; '*' would let any page use them"
            )
        return self


class ServerTlsConfig(BaseModel):
    """The front door's certificate chain and key, in PEM; with ``client_ca`` clients need a certificate, too."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    certificate: Path
    private_key: Path
    client_ca: Path | None = None
    minimum_version: Literal["1.2", "1.3"] = "1.2"

    @field_validator("minimum_version", mode="before")
    @classmethod
    def _as_text(cls, version: Any) -> Any:
        return str(version) if isinstance(version, float) else version  # YAML reads 1.2 as a number


class EngineTlsConfig(BaseModel):
    """Towards engines with `https://` URLs: whom to trust, and what to show."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    ca: Path | None = None
    verify: bool = True
    certificate: Path | None = None
    private_key: Path | None = None

    @model_validator(mode="after")
    def _used(self) -> EngineTlsConfig:
        if self.private_key is not None and self.certificate is None:
            raise ValueError("'private_key' needs the 'certificate' that it belongs to")
        if self.ca is not None and not self.verify:
            raise ValueError("'ca' has no use with verify: false; leave one of them out")
        return self


class TracingConfig(BaseModel):
    """Where the spans of requests go; nowhere without an endpoint."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    otlp_endpoint: str | None = None
    service_name: Annotated[str, Field(min_length=1)] | None = None
    sample_ratio: Annotated[float, Field(ge=0, le=1)] = 1.0

    @field_validator("otlp_endpoint")
    @classmethod
    def _http(cls, endpoint: str | None) -> str | None:
        if endpoint is not None and not re.fullmatch(r"https?://[^/\s]+(/[^\s]*)?", endpoint):
            raise ValueError(f"{endpoint!r} must look like http://collector:4318 (OTLP over HTTP)")
        return endpoint and endpoint.rstrip("/")


class FrontDoorConfig(BaseModel):
    """All of these, as router workers are told."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    cors: CorsConfig | None = None
    tls: ServerTlsConfig | None = None
    engine_tls: EngineTlsConfig = EngineTlsConfig()
    tracing: TracingConfig = TracingConfig()
