"""LMCache's names for chunks of a prompt, computed from tokens.

``h[i] = blake3(h[i - 1] || tokens as big-endian u32)``, ``h[-1] = blake3(0 as i64 || 0 as u32)``, one hash
for each full chunk (256 tokens unless configured). It is the default hash of LMCache's servers; with another
one, or another ``h[-1]``, their chunks cannot be found. Reproduced against the files of a running LMCache
0.5.6. A server that has vLLM at hand takes ``h[-1]`` from vLLM, which is random unless PYTHONHASHSEED is set.
"""

from __future__ import annotations

from dataclasses import dataclass

import blake3
import numpy as np

from cache_index.hashing import Hashes, Tokens

CHUNK_TOKENS = 256
_DIGEST_BYTES = 32
_ROOT = blake3.blake3(bytes(12)).digest()


def chunk_hashes(tokens: Tokens, chunk_tokens: int = CHUNK_TOKENS) -> list[bytes]:
    """The 32-byte hashes of the full chunks of a prompt."""
    digests = ChunkChain(tokens, chunk_tokens).digests(len(tokens) // chunk_tokens)
    return [digests[start : start + _DIGEST_BYTES] for start in range(0, len(digests), _DIGEST_BYTES)]


def index_key(chunk_hash: bytes) -> int:
    """The hash under which a chunk stands in the index: its first eight bytes."""
    return int.from_bytes(chunk_hash[:8], "big")


def chunk_keys(tokens: Tokens, chunk_tokens: int = CHUNK_TOKENS) -> Hashes:
    """``index_key`` of every full chunk of a prompt."""
    return ChunkChain(tokens, chunk_tokens).keys(len(tokens) // chunk_tokens)


class ChunkChain:
    """The chunks of a prompt, hashed as far as they are asked for: 2 us a chunk."""

    def __init__(self, tokens: Tokens, chunk_tokens: int) -> None:
        self.chunks = len(tokens) // chunk_tokens
        self._tokens = tokens
        self._chunk_tokens = chunk_tokens
        self._digests = bytearray()

    def digests(self, chunks: int) -> bytes:
        """The hashes of the first ``chunks`` full chunks in a row, of fewer when the prompt has no more."""
        size, known, wanted = (
            self._chunk_tokens,
            len(self._digests) // _DIGEST_BYTES,
            min(chunks, self.chunks),
        )
        encoded = np.ascontiguousarray(self._tokens[known * size : wanted * size], ">u4").tobytes()
        previous = bytes(self._digests[-_DIGEST_BYTES:]) or _ROOT
        for start in range(0, len(encoded), 4 * size):
            previous = blake3.blake3(previous + encoded[start : start + 4 * size]).digest()
            self._digests += previous
        return bytes(self._digests[: _DIGEST_BYTES * wanted])

    def keys(self, chunks: int) -> Hashes:
        """``index_key`` of the same chunks."""
        words = np.frombuffer(self.digests(chunks), ">u8").reshape(-1, _DIGEST_BYTES // 8)
        return words[:, 0].astype(np.uint64)


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
