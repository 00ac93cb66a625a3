"""LMCache's names for chunks of a prompt, computed from tokens.

``h[i] = blake3(h[i - 1] || tokens as big-endian u32)``, ``h[-1] = blake3(0 as i64 || 0 as u32)``, one hash
for each full chunk (256 tokens unless configured). It is the default hash of LMCache's servers; with another
one their chunks cannot be found. Reproduced against the files of a running LMCache 0.5.6.
"""

from __future__ import annotations

from dataclasses import dataclass

import blake3
import numpy as np

from cache_index.hashing import Hashes, Tokens

CHUNK_TOKENS = 256
_ROOT = blake3.blake3(bytes(12)).digest()


def chunk_hashes(tokens: Tokens, chunk_tokens: int = CHUNK_TOKENS) -> list[bytes]:
    """The 32-byte hashes of the full chunks of a prompt."""
    encoded = np.ascontiguousarray(tokens, ">u4").tobytes()
    chunk_bytes = 4 * chunk_tokens
    hashes: list[bytes] = []
    previous = _ROOT
    for start in range(0, len(encoded) - chunk_bytes + 1, chunk_bytes):
        previous = blake3.blake3(previous + encoded[start : start + chunk_bytes]).digest()
        hashes.append(previous)
    return hashes


def index_key(chunk_hash: bytes) -> int:
    """The hash under which a chunk stands in the index: its first eight bytes."""
    return int.from_bytes(chunk_hash[:8], "big")


def chunk_keys(tokens: Tokens, chunk_tokens: int = CHUNK_TOKENS) -> Hashes:
    """``index_key`` of every full chunk of a prompt."""
    joined = b"".join(chunk_hash[:8] for chunk_hash in chunk_hashes(tokens, chunk_tokens))
    return np.frombuffer(joined, ">u8").astype(np.uint64)


@dataclass(frozen=True, slots=True)
class KvRank:
    """Which shard of a chunk an object is: LMCache stores one object for each worker."""

    world: int
    rank: int
    local_world: int
    local_rank: int

    @classmethod
    def unpack(cls, kv_rank: int) -> KvRank:
        return cls(kv_rank >> 24 & 255, kv_rank >> 16 & 255, kv_rank >> 8 & 255, kv_rank & 255)

    def pack(self) -> int:
        return self.world << 24 | self.rank << 16 | self.local_world << 8 | self.local_rank
