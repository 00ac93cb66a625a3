"""The picker of endpoints that Envoy asks (docs/gateways.md): `endpoint_picker`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field


class PickerTlsConfig(BaseModel):
    """The picker's certificate chain and key, in PEM; with ``client_ca`` gateways need a certificate, too."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    certificate: Path
    private_key: Path
    client_ca: Path | None = None


class EndpointPickerConfig(BaseModel):
    """Off without a port. ``fallbacks`` are how many endpoints are named behind the chosen one.

    ``self_signed``: TLS with a certificate that is made at each start, for gateways that do not look at it.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    host: str | None = None  # as the server's
    port: Annotated[int, Field(ge=1, le=65535)] | None = None
    fallbacks: Annotated[int, Field(ge=0, le=16)] = 2
    tls: PickerTlsConfig | Literal["self_signed"] | None = None
