"""The front door's options as the configuration has them: web pages."""

from __future__ import annotations

from conductor.front_door_config import CorsConfig
from router import CorsPolicy


def cors_policy(config: CorsConfig | None) -> CorsPolicy | None:
    """None where no page may use the front door."""
    if config is None:
        return None
    return CorsPolicy(
        origins=None if config.origins == ["*"] else frozenset(config.origins),
        methods=tuple(config.methods),
        headers=tuple(config.headers),
        credentials=config.credentials,
        max_age_s=config.max_age_s,
    )
