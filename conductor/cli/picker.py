"""The picker of endpoints for Envoy, where the configuration asks for one."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import structlog

from conductor.alternatives import alternatives
from conductor.cli.front_door_options import server_tls
from conductor.config import Config
from conductor.configuration_faults import ConfigError
from conductor.endpoint_picker_config import PickerTlsConfig
from conductor.front_door_config import ServerTlsConfig
from conductor.placement import Target
from conductor.scheduler import Scheduler
from router.services import RouterServices

if TYPE_CHECKING:
    from router.ext_proc.server import Certificate

_log = structlog.get_logger(__name__)

_STREAMS_END_WITHIN_S = 1.0
_VALID_DAYS = 3_650


async def start_picker(
    config: Config,
    services: RouterServices,
    scheduler: Scheduler,
    clock: Callable[[], float],
    stack: AsyncExitStack,
) -> None:
    """Listen for gateways; stopped when ``stack`` closes. Raises ConfigError naming the key at fault."""
    picker = config.endpoint_picker
    if picker.port is None:
        return
    try:
        from router.ext_proc.server import PickerServer
        from router.ext_proc.stream import Surroundings
    except ImportError as error:
        raise ConfigError(
            f"endpoint_picker.port: the picker needs gRPC ({error}): pip install 'kv-conductor[envoy]'"
        ) from None

    def targets() -> list[Target]:
        return [instance.ranks[0].target for instance in scheduler.cluster]

    def others(placement_id: str) -> list[Target]:
        record = scheduler.find(placement_id)
        return [] if record is None else alternatives(record, picker.fallbacks)

    host = picker.host or config.server.host
    server = PickerServer(
        Surroundings(services, targets, others),
        lambda: scheduler.why_not_ready(clock()),
        host=host,
        port=picker.port,
        certificate=None if picker.tls is None else _certificate(picker.tls),
    )
    try:
        await server.start()
    except OSError as error:
        raise ConfigError(
            f"endpoint_picker.port: cannot listen ({error.strerror}); choose another one"
        ) from None
    stack.push_async_callback(server.stop, _STREAMS_END_WITHIN_S)
    _log.info("picking endpoints for gateways", host=host, port=server.port, tls=picker.tls is not None)


def _certificate(tls: PickerTlsConfig | str) -> Certificate:
    """Raises ConfigError."""
    from router.ext_proc.server import Certificate

    if not isinstance(tls, PickerTlsConfig):
        return _self_signed()
    files = ServerTlsConfig(certificate=tls.certificate, private_key=tls.private_key, client_ca=tls.client_ca)
    try:
        server_tls(files)  # says which file cannot be used, and why; gRPC does not
    except ConfigError as error:
        raise ConfigError(str(error).replace("server.tls.", "endpoint_picker.tls.", 1)) from None
    return Certificate(
        tls.certificate.read_bytes(),
        tls.private_key.read_bytes(),
        None if tls.client_ca is None else tls.client_ca.read_bytes(),
    )


def _self_signed() -> Certificate:
    """Raises ConfigError where what makes it is not installed."""
    from router.ext_proc.server import Certificate

    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.x509.oid import NameOID
    except ImportError as error:
        raise ConfigError(
            f"endpoint_picker.tls: self_signed needs cryptography ({error}): pip install 'kv-conductor[envoy]'"
        ) from None
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "conductor")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))  # clocks differ
        .not_valid_after(now + datetime.timedelta(days=_VALID_DAYS))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    return Certificate(
        certificate.public_bytes(serialization.Encoding.PEM),
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        ),
    )
