"""The front door's options as the configuration has them: web pages, certificates, whom engines are trusted by."""

from __future__ import annotations

import ssl

import structlog

from conductor.configuration_faults import ConfigError
from conductor.front_door_config import CorsConfig, EngineTlsConfig, ServerTlsConfig
from router.cors import CorsPolicy
from router.tls import ServerTls, TlsError, engine_tls

_log = structlog.get_logger(__name__)
_VERSIONS = {"1.2": ssl.TLSVersion.TLSv1_2, "1.3": ssl.TLSVersion.TLSv1_3}


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


def server_tls(config: ServerTlsConfig | None) -> ServerTls | None:
    """None where the front door speaks plain HTTP. Raises ConfigError naming the key of the file at fault."""
    if config is None:
        return None
    try:
        return ServerTls(
            config.certificate,
            config.private_key,
            client_ca=config.client_ca,
            minimum_version=_VERSIONS[config.minimum_version],
        )
    except TlsError as error:
        raise ConfigError(f"server.tls.{error}") from None


def engine_context(config: EngineTlsConfig) -> ssl.SSLContext:
    """For every connection to an engine with an https URL. Raises ConfigError, as above."""
    try:
        return engine_tls(
            ca=config.ca,
            verify=config.verify,
            certificate=config.certificate,
            private_key=config.private_key,
        )
    except TlsError as error:
        raise ConfigError(f"routing.engine_tls.{error}") from None


def reload_certificate(tls: ServerTls) -> None:
    """On SIGHUP: a renewed certificate is used from the next connection on."""
    try:
        tls.reload()
    except TlsError as error:
        _log.error("the certificate was not reloaded; the former one stays", reason=f"server.tls.{error}")
    else:
        _log.info("the certificate was reloaded")
