"""vLLM's block hashes (``sha256_cbor``): a chained digest that names a whole prefix up to a block.

``h[i] = SHA256(CBOR((h[i-1], tokens, extra_keys)))`` in canonical CBOR, where ``h[-1]`` is the hash of vLLM's
fixed seed string. Equal digests mean equal prefixes, equal salts included.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from typing import Final

ALGORITHM: Final = "sha256_cbor"

_UNSIGNED, _BYTES, _TEXT, _ARRAY = 0x00, 0x40, 0x60, 0x80
_NULL: Final = b"\xf6"


def _head(major: int, value: int) -> bytes:
    if value < 24:
        return bytes((major | value,))
    if value < 1 << 8:
        return bytes((major | 24, value))
    if value < 1 << 16:
        return struct.pack(">BH", major | 25, value)
    return struct.pack(">BI", major | 26, value)


def _text(value: str) -> bytes:
    encoded = value.encode()
    return _head(_TEXT, len(encoded)) + encoded


# A table beats encoding each id: hashing is on the path of every prompt token.
_TOKENS: Final = tuple(_head(_UNSIGNED, token) for token in range(1 << 16))
ROOT: Final = hashlib.sha256(_text("vllm-none-hash")).digest()


def _tokens(tokens: Sequence[int]) -> bytes:
    try:
        return b"".join([_TOKENS[token] for token in tokens])
    except IndexError:
        return b"".join([_head(_UNSIGNED, token) for token in tokens])


def block_digest(parent: bytes, tokens: Sequence[int], salt: str | None = None) -> bytes:
    """32-byte digest of a block of ``tokens`` behind ``parent``; ``salt`` only for a chain's first block."""
    extra = _NULL
    if salt is not None:
        extra = _head(_ARRAY, 1) + _head(_ARRAY, 2) + _text("cache_salt") + _text(salt)
    return hashlib.sha256(
        b"".join(
            (
                _head(_ARRAY, 3),
                _head(_BYTES, len(parent)),
                parent,
                _head(_ARRAY, len(tokens)),
                _tokens(tokens),
                extra,
            )
        )
    ).digest()


def digest_as_int(digest: bytes) -> int:
    """The low 64 bits, which is what vLLM publishes by default."""
    return int.from_bytes(digest[-8:], "big")


class HashChain:
    """The digests of the full blocks of a growing token list.

    ``tokens`` may be appended to from outside; ``digests`` follows when asked. Cost is linear in new tokens.
    """

    __slots__ = ("_digests", "block_size", "salt", "tokens")

    def __init__(self, tokens: list[int], block_size: int, salt: str | None = None) -> None:
        self.tokens = tokens
        self.block_size = block_size
        self.salt = salt
        self._digests: list[bytes] = []

    def digests(self, blocks: int) -> list[bytes]:
        """The first ``blocks`` digests at least; ``blocks`` full blocks must exist."""
        size, known = self.block_size, self._digests
        for index in range(len(known), blocks):
            parent, salt = (known[-1], None) if known else (ROOT, self.salt)
            known.append(block_digest(parent, self.tokens[index * size : (index + 1) * size], salt))
        return known

    def parent(self, block: int) -> bytes | None:
        """Digest of the block before ``block``, None for the first."""
        return self._digests[block - 1] if block else None

    def block_tokens(self, block: int) -> list[int]:
        return self.tokens[block * self.block_size : (block + 1) * self.block_size]

    def usable_blocks(self) -> int:
        """How many leading blocks may come from a cache: the last token is always computed."""
        return (len(self.tokens) - 1) // self.block_size
