"""The keys of the configuration, as the front door checks them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from conductor.access_config import ApiKeyConfig, is_sendable_key
from conductor.config import Config
from conductor.configuration_faults import ConfigError
from router import ApiKey, KeyLimits, KeyRing


def make_key_ring(config: Config, environment: Mapping[str, str]) -> KeyRing | None:
    """None where no keys are configured, and everybody may use everything. Raises ConfigError."""
    return KeyRing(api_keys(config, environment)) if config.api_keys else None


def make_rest_ring(config: Config, environment: Mapping[str, str]) -> KeyRing | None:
    """Who may use the REST API; None where everybody may. Raises ConfigError."""
    keys = rest_keys(config, environment)
    return KeyRing(keys) if keys else None


def api_keys(config: Config, environment: Mapping[str, str]) -> list[ApiKey]:
    """Those of clients. Raises ConfigError, also for a key that is there twice."""
    return _all_different([_api_key(key, config, environment) for key in config.api_keys])


def rest_keys(config: Config, environment: Mapping[str, str]) -> list[ApiKey]:
    """The keys above and `server.admin_token`. Raises as they do."""
    keys, token = api_keys(config, environment), config.server.admin_token
    if token is None:
        return keys
    digest = hashlib.sha256(token.get_secret_value().encode()).digest()
    name = "server.admin_token"
    return _all_different([*keys, ApiKey(name, digest, tenant=name, admin=True)])


def _all_different(keys: list[ApiKey]) -> list[ApiKey]:
    try:
        KeyRing(keys)
    except ValueError as error:
        raise ConfigError(f"api_keys: {error}") from None
    return keys


def _api_key(key: ApiKeyConfig, config: Config, environment: Mapping[str, str]) -> ApiKey:
    limits = key.limits
    return ApiKey(
        name=key.name,
        sha256=_sha256(key, environment),
        tenant=key.tenant or key.name,
        limits=KeyLimits(limits.requests_per_minute, limits.tokens_per_minute, limits.concurrency),
        models=None if key.models is None else _with_aliases(key.models, config),
        priority=key.priority,
        admin=key.admin,
        registers=key.registers,
    )


def _sha256(key: ApiKeyConfig, environment: Mapping[str, str]) -> bytes:
    if key.key_sha256 is not None:
        return bytes.fromhex(key.key_sha256.get_secret_value())
    if key.key is not None:
        return hashlib.sha256(key.key.get_secret_value().encode()).digest()
    assert key.key_env is not None
    value = environment.get(key.key_env, "")
    if not is_sendable_key(value):
        raise ConfigError(
            f"api_keys: the key {key.name!r} is to be in the environment variable {key.key_env!r}, which is "
            f"{'not printable ASCII without spaces' if value else 'not set'}"
        )
    return hashlib.sha256(value.encode()).digest()


def _with_aliases(names: list[str], config: Config) -> frozenset[str]:
    """Who may use a model may call it by its other names."""
    aliases = {alias for model in config.models if model.name in names for alias in model.aliases}
    return frozenset(names) | aliases
