"""An engine as people describe it: an entry of `instances`, wherever such entries come from."""

from __future__ import annotations

import re
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator, model_validator

from conductor.catalogue import INSTANCE_CLASSES
from conductor.instance_speeds import InstanceSpeeds
from conductor.placement import Role


def catalogued(name: str) -> str:
    """Raises ValueError for an instance class that is not in the catalogue."""
    if name not in INSTANCE_CLASSES:
        raise ValueError(f"unknown instance class {name!r}; known: {', '.join(INSTANCE_CLASSES)}")
    return name


class KvEventsConfig(BaseModel):
    """Endpoints of one instance's KV events, where the engine does not tell them (GET /kv_event_sources)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    endpoint: str
    replay_endpoint: str | None = None
    topic: str = ""


class InstanceConfig(BaseModel):
    """One engine."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: Annotated[str, Field(min_length=1)]
    url: str
    role: Role = Role.MIXED
    instance_class: str = "llama-3.1-8b-h100"
    speeds: InstanceSpeeds = InstanceSpeeds()
    protocol: str = "vllm-nixl"
    bootstrap_port: Annotated[int, Field(ge=1, le=65535)] = 8998
    ranks: Annotated[int, Field(ge=1, le=1024)] = 1
    block_size: Annotated[int, Field(gt=0, le=65_536)] | None = None
    location: str = ""
    fetches_from_peers: bool = False
    streams_layers: bool = False
    kv_events: list[KvEventsConfig] | None = None
    lmcache_servers: list[str] = []
    api_key: SecretStr | None = None

    @field_validator("instance_class")
    @classmethod
    def _known_class(cls, name: str) -> str:
        return catalogued(name)

    @field_validator("url")
    @classmethod
    def _without_path(cls, url: str) -> str:
        if not re.fullmatch(r"https?://[^/\s]+/?", url):
            raise ValueError(f"url {url!r} must look like http://host:port or https://host:port")
        try:
            port = urlsplit(url).port
        except ValueError as error:
            raise ValueError(f"url {url!r}: {error}") from None
        if port == 0:
            raise ValueError(f"url {url!r}: no engine listens on port 0")
        return url.rstrip("/")

    @model_validator(mode="after")
    def _one_stream_a_rank(self) -> InstanceConfig:
        if self.kv_events is not None and len(self.kv_events) != self.ranks:
            raise ValueError(
                f"kv_events has {len(self.kv_events)} entries for {self.ranks} ranks; give one a rank"
            )
        return self
