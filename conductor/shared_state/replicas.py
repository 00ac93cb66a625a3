"""Who shares the state: each replica's record, which ends with its presence."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Iterable, Mapping
from urllib.parse import urlsplit

import msgspec

_WILDCARDS = frozenset(("0.0.0.0", "::", ""))


class Replica(msgspec.Struct, frozen=True):
    """``url`` is where the others reach it; times are Unix seconds."""

    replica: str
    url: str
    started_at_s: float
    warm_streams: int = 0  # of engines' events, of which it has missed nothing
    instances: int = 0


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Replica).decode


def encoded(replica: Replica) -> bytes:
    return _encode(replica)


def decoded(records: Mapping[str, bytes]) -> list[Replica]:
    """In the order in which they started. Raises msgspec.DecodeError."""
    return sorted((_decode(record) for record in records.values()), key=lambda each: each.started_at_s)


def new_id(name: str | None) -> str:
    """Of one process: a restarted replica is another one."""
    return f"{name or socket.gethostname()}-{secrets.token_hex(3)}"


def reachable_url(listening_url: str, redis_url: str) -> str:
    """``listening_url``, with the address that this host has on the way to Redis where it listens on all."""
    parts = urlsplit(listening_url)
    if (parts.hostname or "") not in _WILDCARDS:
        return listening_url
    redis = urlsplit(redis_url)
    host = "127.0.0.1"
    if redis.hostname:
        try:
            found = socket.getaddrinfo(redis.hostname, redis.port or 6379, type=socket.SOCK_DGRAM)
            family, kind, _, _, address = found[0]
            with socket.socket(family, kind) as probe:
                probe.connect(address)  # sends nothing
                host = str(probe.getsockname()[0])
        except OSError:
            host = socket.gethostname()
    shown = f"[{host}]" if ":" in host else host
    return f"{parts.scheme}://{shown}:{parts.port}"


def helpful(peers: Iterable[Replica]) -> list[Replica]:
    """Those whose index is worth having, the best first."""
    return sorted((p for p in peers if p.warm_streams), key=lambda p: (-p.warm_streams, p.started_at_s))
