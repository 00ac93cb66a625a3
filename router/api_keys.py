"""Keys of clients: who sends a request, told by the key it carries."""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from router.accounts import UNLIMITED, Account, KeyLimits, TenantCounts
from router.errors import RequestError
from router.heads import Headers


@dataclass(frozen=True, slots=True)
class ApiKey:
    """``sha256`` is the digest of the key. ``models`` are the names it may ask for, None: all.

    ``priority`` is the highest its requests may have. ``admin`` keys may use the whole REST API,
    those that ``registers`` the part of it by which engines join and leave.
    """

    name: str
    sha256: bytes = field(repr=False)
    tenant: str
    limits: KeyLimits = UNLIMITED
    models: frozenset[str] | None = None
    priority: int = 0
    admin: bool = False
    registers: bool = False

    def check_model(self, model: str) -> None:
        """Raises RequestError (403)."""
        if self.models is not None and model not in self.models:
            allowed = ", ".join(sorted(self.models))
            raise RequestError(
                403,
                f"This key may not use the model {model!r}; it may use: {allowed}.",
                kind="permission_error",
                param="model",
                code="model_not_allowed",
            )


class KeyRing:
    """All keys with their accounts.

    Keys are found by a digest that is keyed with a secret of this process: how long a look-up takes tells
    nothing about any key, and nobody can choose what is compared.
    """

    def __init__(
        self,
        keys: Iterable[ApiKey],
        make_account: Callable[[ApiKey, TenantCounts], Account] = lambda key, tenant: Account(
            key.name, key.limits, tenant
        ),
    ) -> None:
        """Raises ValueError for a key that is there twice."""
        self._secret = os.urandom(32)
        self._make_account = make_account
        self._known: dict[bytes, tuple[ApiKey, Account]] = {}
        self.keys: tuple[ApiKey, ...] = ()
        self.tenants: dict[str, TenantCounts] = {}  # former ones too
        self.accounts: dict[str, Account] = {}  # by the keys' names
        self.replace(keys)

    def replace(self, keys: Iterable[ApiKey]) -> None:
        """No others are known from now on; what has been admitted goes on.

        One whose name, tenant and limits stay has used what it had used of them. Raises ValueError for a key that
        is there twice, and changes nothing then.
        """
        keys, former = tuple(keys), {(key.name, key.tenant, key.limits) for key in self.keys}
        known: dict[bytes, tuple[ApiKey, Account]] = {}
        accounts: dict[str, Account] = {}
        for key in keys:
            blinded = self._blinded(key.sha256)
            if blinded in known:
                raise ValueError(f"the keys {known[blinded][0].name!r} and {key.name!r} are the same")
            if (key.name, key.tenant, key.limits) in former:
                account = self.accounts[key.name]
            else:
                account = self._make_account(key, self.tenants.setdefault(key.tenant, TenantCounts()))
            accounts[key.name] = account
            known[blinded] = (key, account)
        self._known, self.accounts, self.keys = known, accounts, keys

    def identify(self, headers: Headers) -> tuple[ApiKey, Account]:
        """Raises RequestError (401)."""
        given = presented_key(headers)
        if given is None:
            raise _unauthorized(
                "No API key was sent. Send 'Authorization: Bearer KEY' or 'x-api-key: KEY'.",
                "missing_api_key",
            )
        found = self._known.get(self._blinded(hashlib.sha256(given).digest()))
        if found is None:
            raise unknown_key()
        return found

    def _blinded(self, digest: bytes) -> bytes:
        return hashlib.blake2b(digest, key=self._secret).digest()


def presented_key(headers: Headers) -> bytes | None:
    """The key in ``Authorization`` or, where that is missing, in ``x-api-key``.

    Of ``Basic`` it is the password: that is how a program sends a key which only takes a URL.
    """
    for name, value in headers:
        if name == b"authorization":
            scheme, _, key = value.partition(b" ")
            if scheme.lower() == b"basic":
                return _password(key)
            return key.strip() or None if scheme.lower() == b"bearer" else None
    return next((value for name, value in headers if name == b"x-api-key" and value), None)


def _password(credentials: bytes) -> bytes | None:
    try:
        return base64.b64decode(credentials.strip(), validate=True).partition(b":")[2] or None
    except binascii.Error:
        return None


def unknown_key() -> RequestError:
    return _unauthorized("The API key is not known here.", "invalid_api_key")


def _unauthorized(message: str, code: str) -> RequestError:
    return RequestError(401, message, kind="authentication_error", code=code)
