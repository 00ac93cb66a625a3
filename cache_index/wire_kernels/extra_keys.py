"""Extra keys of blocks, folded into their local hashes.

Their canonical form is that of ``hashing.canonical_hash``; here only lists of texts occur.
"""

# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

import numpy as np

from cache_index.kernel_set import outlined
from cache_index.kernels.machine_words import ZERO, secret_at, u64
from cache_index.kernels.xxh3 import hash_bytes, hash_pair
from cache_index.wire_kernels.layout import (
    BLOCKS,
    HASHES,
    KEYS,
    KEYS_BYTES,
    KEYS_USED,
    LANES,
    NAMES_KEYS,
    PLAIN_SECRETS,
    SEED,
)
from cache_index.wire_kernels.msgpack import (
    array_at,
    byte_at,
    is_ascii,
    low_bytes,
    put_word,
    text_at,
    word_at,
    word_of,
)

LIST_TAG, TEXT_TAG = word_of(b"list"), word_of(b"text")


@outlined
def add_text(work, begin, length):
    """Append the canonical form of a text to the scratch; whether it fits and is ASCII."""
    used = work[KEYS_USED]
    padded = (length + 3) & ~np.int64(3)
    if used + padded + 32 > work[KEYS_BYTES] or not is_ascii(begin, length):
        return False
    at = work[KEYS] + used
    put_word(at, TEXT_TAG | (u64(length) << u64(32)))
    for offset in range(0, length, 8):
        put_word(at + 8 + offset, word_at(begin + offset) & low_bytes(length - offset))
    work[KEYS_USED] = used + 8 + padded
    return True


@outlined
def canonical_hash(work):
    lanes = secret_at(work[LANES])
    return hash_bytes(work[KEYS], work[KEYS_USED], ZERO, work[PLAIN_SECRETS], lanes)


@outlined
def same_text(first, first_length, second, second_length):
    if first_length != second_length:
        return False
    for offset in range(0, first_length, 8):
        different = word_at(first + offset) ^ word_at(second + offset)
        if different & low_bytes(first_length - offset) != ZERO:
            return False
    return True


@outlined
def fold_list(work, keys):
    """Fold of the ``keys`` texts in the scratch, behind the eight bytes left free for the list."""
    put_word(work[KEYS], LIST_TAG | (u64(keys) << u64(32)))
    return canonical_hash(work)


@outlined
def fold_extra_keys(work, at, end, blocks, adapter, adapter_length):
    """Fold each block's extra keys into its local hash; the adapter (-1: none) does not count.

    Returns 1 when the first block has keys, 0 when not, -1 when there are others than texts.
    """
    count, at = array_at(at, end)
    if at < 0 or count != blocks:
        return np.int64(-1)
    hashes = secret_at(work[HASHES] + 8 * work[BLOCKS])
    first_has_keys = np.int64(0)
    for block in range(blocks):
        if byte_at(at) == 0xC0 and at < end:
            at += 1
            continue
        items, at = array_at(at, end)
        if at < 0:
            return np.int64(-1)
        if items > 0:
            work[NAMES_KEYS] = 1
        work[KEYS_USED] = 8
        keys = 0
        adapter_left = adapter >= 0
        for _ in range(items):
            length, begin = text_at(at, end)
            if begin < 0:
                return np.int64(-1)
            at = begin + length
            if adapter_left and same_text(begin, length, adapter, adapter_length):
                adapter_left = False
                continue
            if not add_text(work, begin, length):
                return np.int64(-1)
            keys += 1
        if keys > 0:
            hashes[block] = hash_pair(hashes[block], fold_list(work, keys), u64(work[SEED]))
            if block == 0:
                first_has_keys = np.int64(1)
    return first_has_keys
