"""Certificates of an authority that exists for one test."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

import trustme

HOST = "127.0.0.1"


@dataclass(frozen=True)
class Identity:
    certificate: Path
    private_key: Path


class Authority:
    def __init__(self, folder: Path, name: str = "ca") -> None:
        self._folder = folder
        self._name = name
        self._ca = trustme.CA(organization_name=name)
        self.file = folder / f"{name}.pem"
        self._ca.cert_pem.write_to_path(str(self.file))

    def issue(self, name: str, *hosts: str) -> Identity:
        """A certificate for ``hosts`` (this machine where none is given); one of the same name is replaced."""
        issued = self._ca.issue_cert(*(hosts or (HOST, "localhost")))
        identity = Identity(
            self._folder / f"{self._name}-{name}.crt", self._folder / f"{self._name}-{name}.key"
        )
        identity.private_key.write_bytes(issued.private_key_pem.bytes())
        identity.certificate.write_bytes(b"".join(part.bytes() for part in issued.cert_chain_pems))
        return identity

    def server(self, identity: Identity, *, client_ca: Path | None = None) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(identity.certificate, identity.private_key)
        if client_ca is not None:
            context.load_verify_locations(client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def client(self, identity: Identity | None = None) -> ssl.SSLContext:
        """Trusts this authority alone."""
        context = ssl.create_default_context(cafile=self.file)
        if identity is not None:
            context.load_cert_chain(identity.certificate, identity.private_key)
        return context
