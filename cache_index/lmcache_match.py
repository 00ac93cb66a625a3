"""How much of a prompt stands in the index under LMCache's names."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from cache_index.hashing import Namespace, Tokens
from cache_index.lmcache_keys import ChunkChain
from cache_index.radix import CacheIndex

FIRST_CHUNKS = 16  # hashed before anything is known; more only for prompts that are held that far


def match_chunks(
    index: CacheIndex, namespaces: Sequence[Namespace], tokens: Tokens, chunk_sizes: Sequence[int]
) -> NDArray[np.int32]:
    """``[holder_id, tier]`` as CacheIndex.match, in tokens; of several namespaces or sizes the best counts.

    Hashes the prompt once for each chunk size, four times as far as anybody holds it at most.
    """
    found = [
        level * np.int32(size) for size in chunk_sizes for level in _match(index, namespaces, tokens, size)
    ]
    rows = min(len(each) for each in found)  # holders may be registered meanwhile
    levels: NDArray[np.int32] = np.maximum.reduce([each[:rows] for each in found])
    return levels


def _match(
    index: CacheIndex, namespaces: Sequence[Namespace], tokens: Tokens, chunk_tokens: int
) -> list[NDArray[np.int32]]:
    chain, asked = ChunkChain(tokens, chunk_tokens), FIRST_CHUNKS
    while True:
        keys = chain.keys(asked)
        levels = [index.match(namespace, keys) for namespace in namespaces]
        if asked >= chain.chunks or all(each.max(initial=0) < asked for each in levels):
            return levels
        asked *= 4
