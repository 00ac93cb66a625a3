"""Block hashes: what identifies a prefix, whoever computed its KV cache.

``local = XXH3_64(tokens as little-endian u32, seed)``, ``seq[0] = local[0]``,
``seq[i] = XXH3_64(seq[i - 1] || local[i], seed)``. A block with extra keys (cache salt, multimodal
identifiers) uses ``XXH3_64(local || fold, seed)`` as its local hash, where ``fold`` hashes the keys.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from cache_index import kernels
from cache_index.kernel_set import entry_point
from cache_index.self_check import ensure_ready

Hashes = NDArray[np.uint64]
Tokens = NDArray[np.uint32]

DEFAULT_SEED = 1337
_NO_FOLDS = np.empty(0, np.uint64)


def _encode(value: object, into: bytearray) -> None:
    """Append a canonical, self-delimiting form: four-byte tag, length, payload padded to four bytes."""
    if isinstance(value, list | tuple):
        into += b"list" + struct.pack("<I", len(value))
        for item in value:
            _encode(item, into)
        return
    if value is None:
        tag, payload = b"none", b""
    elif isinstance(value, str):
        tag, payload = b"text", value.encode("utf-8", "surrogatepass")
    elif isinstance(value, bytes | bytearray):
        tag, payload = b"byte", bytes(value)
    elif isinstance(value, bool):
        tag, payload = b"bool", bytes([value])
    elif isinstance(value, int):
        tag, payload = b"int ", str(value).encode()
    elif isinstance(value, float):
        tag, payload = b"real", struct.pack("<d", value)
    elif isinstance(value, dict):
        _encode(sorted(value.items(), key=repr), into)
        return
    else:
        raise TypeError(f"cannot hash a value of type {type(value).__name__}")
    into += tag + struct.pack("<I", len(payload)) + payload + bytes(-len(payload) % 4)


def canonical_hash(value: object) -> int:
    """XXH3_64 (seed 0) of a canonical encoding of nested lists, texts, numbers and bytes."""
    ensure_ready()
    encoded = bytearray()
    _encode(value, encoded)
    return int(kernels.hash_words(np.frombuffer(encoded, dtype="<u4"), np.uint64(0), kernels.secrets_for(0)))


@lru_cache(maxsize=4_096)
def _domain(model: str, block_size: int, lora: str | None, tenant: str) -> int:
    """Of a namespace; there are few, and one is made for every request."""
    return canonical_hash([model, block_size, lora, tenant])


@dataclass(frozen=True, slots=True)
class Namespace:
    """What makes equal tokens unequal caches. Its ``domain`` separates them in the index."""

    model: str
    block_size: int
    lora: str | None = None
    tenant: str = "default"
    domain: int = field(init=False, repr=False, compare=False)
    domain_word: np.uint64 = field(init=False, repr=False, compare=False)  # the same, as kernels take it

    def __post_init__(self) -> None:
        domain = _domain(self.model, self.block_size, self.lora, self.tenant)
        object.__setattr__(self, "domain", domain)
        object.__setattr__(self, "domain_word", np.uint64(domain))


def fold_extra_keys(keys: Sequence[object] | None) -> int:
    """One word that stands for a block's extra keys; 0 when there are none.

    The LoRA name, which engines list among them, belongs to the namespace and must be dropped before.
    """
    return canonical_hash(list(keys)) if keys else 0


def sequence_hashes(
    tokens: Tokens, block_size: int, *, cache_salt: str | None = None, seed: int = DEFAULT_SEED
) -> Hashes:
    """Sequence hashes of the full blocks of a prompt; a salt counts as extra key of the first block."""
    return chain_hashes(tokens, block_size, folds=salt_folds(cache_salt), seed=seed)


def salt_folds(cache_salt: str | None) -> Hashes:
    """What `chain_hashes` folds into a prompt's blocks for its salt."""
    return _NO_FOLDS if not cache_salt else np.array([fold_extra_keys([cache_salt])], np.uint64)


def chain_hashes(
    tokens: Tokens, block_size: int, *, parent: int = 0, folds: Hashes = _NO_FOLDS, seed: int = DEFAULT_SEED
) -> Hashes:
    """Sequence hashes of the full blocks of ``tokens``, which follow the block ``parent`` (0: none).

    ``folds`` holds, from the first block on, one word per block from fold_extra_keys (0: no keys).
    """
    if block_size <= 0:
        raise ValueError(f"block_size must be positive, not {block_size}")
    tokens = np.ascontiguousarray(tokens, dtype=np.uint32)
    hashes = np.empty(len(tokens) // block_size, np.uint64)
    folds = np.ascontiguousarray(folds, dtype=np.uint64)
    _hash_chain()(tokens, block_size, seed, kernels.secrets_for(seed), parent, folds, hashes)
    return hashes


@lru_cache(maxsize=1)
def _hash_chain() -> Callable[..., None]:
    ensure_ready()
    return entry_point(kernels.hash_chain)
