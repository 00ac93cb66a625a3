"""TLS of the front door and towards engines: contexts made of PEM files, and which file is at fault."""

from __future__ import annotations

import ssl
from pathlib import Path


class TlsError(Exception):
    """A file cannot be used; the message begins with the field that names it."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")


class ServerTls:
    """The front door's certificate. With ``client_ca`` only clients with a certificate of that authority get in.

    Raises TlsError.
    """

    def __init__(
        self,
        certificate: Path,
        private_key: Path,
        *,
        client_ca: Path | None = None,
        minimum_version: ssl.TLSVersion = ssl.TLSVersion.TLSv1_2,
    ) -> None:
        self._certificate = certificate
        self._private_key = private_key
        self.context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self.context.minimum_version = minimum_version
        self.context.set_alpn_protocols(["http/1.1"])
        _load_identity(self.context, certificate, private_key)
        if client_ca is not None:
            _load_authorities(self.context, client_ca, "client_ca")
            self.context.verify_mode = ssl.CERT_REQUIRED

    def reload(self) -> None:
        """Read certificate and key again, for connections from now on.

        Raises TlsError, and goes on with the former ones, where the new ones cannot be used.
        """
        _load_identity(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), self._certificate, self._private_key)
        _load_identity(self.context, self._certificate, self._private_key)


def engine_tls(
    *,
    ca: Path | None = None,
    verify: bool = True,
    certificate: Path | None = None,
    private_key: Path | None = None,
) -> ssl.SSLContext:
    """For connections to engines: whom to trust (None: the system's authorities), and what to show.

    Raises TlsError.
    """
    context = ssl.create_default_context()
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if ca is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # trusts nobody else
        _load_authorities(context, ca, "ca")
    if not verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if certificate is not None:
        _load_identity(context, certificate, certificate if private_key is None else private_key)
    return context


def _load_identity(context: ssl.SSLContext, certificate: Path, private_key: Path) -> None:
    for field, path in (("certificate", certificate), ("private_key", private_key)):
        _check_readable(path, field)

    def encrypted() -> str:
        raise TlsError("private_key", f"{private_key} is encrypted; give a key without a passphrase")

    try:
        context.load_cert_chain(certificate, private_key, encrypted)
    except ssl.SSLError as error:
        if "KEY_VALUES_MISMATCH" in str(error):
            raise TlsError(
                "private_key", f"{private_key} does not belong to the certificate in {certificate}"
            ) from None
        _load_authorities(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), certificate, "certificate")
        raise TlsError("private_key", f"{private_key} holds no private key in PEM: {error}") from None


def _load_authorities(context: ssl.SSLContext, path: Path, field: str) -> None:
    _check_readable(path, field)
    try:
        context.load_verify_locations(path)
    except ssl.SSLError as error:
        raise TlsError(field, f"{path} holds no certificate in PEM: {error}") from None


def _check_readable(path: Path, field: str) -> None:
    try:
        with path.open("rb"):
            pass
    except OSError as error:
        raise TlsError(field, f"cannot read {path}: {error.strerror}") from None
