"""XXH3-64, bit for bit as in the xxHash library, and the rolling hashes of blocks."""

# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

import functools

import numpy as np
from numpy.typing import NDArray

from cache_index.kernel_set import inlined
from cache_index.kernels.compilation import IN_U32, IN_U64, INTEGER, OUT_U64, WORD, kernel
from cache_index.kernels.machine_words import (
    LOW_32,
    ZERO,
    load32,
    load64,
    multiply_fold,
    secret_at,
    swap_bytes,
    u64,
)

_SECRET_BYTES = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671f"
    "cb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c"
    "3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364"
    "eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e"
    "2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)


def _secret_at(offset: int) -> int:
    return int.from_bytes(_SECRET_BYTES[offset : offset + 8], "little")


@functools.cache
def secrets_for(seed: int) -> NDArray[np.uint64]:
    """The secret, and from word SEEDED on its variant for inputs above 240 bytes."""
    secret = np.frombuffer(_SECRET_BYTES, dtype="<u8")
    offsets = np.array([seed, (1 << 64) - seed & (1 << 64) - 1] * 12, np.uint64)
    return np.concatenate([secret, secret + offsets])


SEEDED = 24
FLIP_0 = np.uint64(_secret_at(56) ^ _secret_at(64))
FLIP_8 = np.uint64(_secret_at(8) ^ _secret_at(16))
FLIP_16_LOW = np.uint64(_secret_at(24) ^ _secret_at(32))
FLIP_16_HIGH = np.uint64(_secret_at(40) ^ _secret_at(48))
PRIME32_1 = np.uint64(0x9E3779B1)
PRIME32_2 = np.uint64(0x85EBCA77)
PRIME32_3 = np.uint64(0xC2B2AE3D)
PRIME64_1 = np.uint64(0x9E3779B185EBCA87)
PRIME64_2 = np.uint64(0xC2B2AE3D27D4EB4F)
PRIME64_3 = np.uint64(0x165667B19E3779F9)
PRIME64_4 = np.uint64(0x85EBCA77C2B2AE63)
PRIME64_5 = np.uint64(0x27D4EB2F165667C5)
PRIME_MIX_1 = np.uint64(0x165667919E3779F9)
PRIME_MIX_2 = np.uint64(0x9FB21C651E98DF25)


@inlined
def avalanche(word):
    word ^= word >> u64(37)
    word *= PRIME_MIX_1
    return word ^ (word >> u64(32))


@inlined
def avalanche_xxh64(word):
    word ^= word >> u64(33)
    word *= PRIME64_2
    word ^= word >> u64(29)
    word *= PRIME64_3
    return word ^ (word >> u64(32))


@inlined
def rotate_left(word, bits):
    return (word << u64(bits)) | (word >> u64(64 - bits))


@inlined
def secret_word(secret, offset):
    """Eight bytes of a secret (words) from byte ``offset``."""
    word = offset >> 3
    shift = u64((offset & 7) * 8)
    if shift == ZERO:
        return secret[word]
    return (secret[word] >> shift) | (secret[word + 1] << (u64(64) - shift))


@inlined
def mix_16(address, secret, offset, seed):
    low = load64(address) ^ (secret_word(secret, offset) + seed)
    high = load64(address + 8) ^ (secret_word(secret, offset + 8) - seed)
    return multiply_fold(low, high)


@inlined
def hash_pair(a, b, seed):
    """XXH3-64 of the sixteen bytes a || b."""
    low = a ^ (FLIP_16_LOW + seed)
    high = b ^ (FLIP_16_HIGH - seed)
    return avalanche(u64(16) + swap_bytes(low) + high + multiply_fold(low, high))


@inlined
def hash_up_to_16(address, length, seed):
    if length > 8:
        low = load64(address) ^ (FLIP_16_LOW + seed)
        high = load64(address + length - 8) ^ (FLIP_16_HIGH - seed)
        return avalanche(u64(length) + swap_bytes(low) + high + multiply_fold(low, high))
    if length == 0:
        return avalanche_xxh64(seed ^ FLIP_0)
    seed ^= (swap_bytes(seed & LOW_32) >> u64(32)) << u64(32)
    first = u64(load32(address)) & LOW_32
    last = u64(load32(address + length - 4)) & LOW_32
    word = (last + (first << u64(32))) ^ (FLIP_8 - seed)
    word ^= rotate_left(word, 49) ^ rotate_left(word, 24)
    word *= PRIME_MIX_2
    word ^= (word >> u64(35)) + u64(length)
    word *= PRIME_MIX_2
    return word ^ (word >> u64(28))


@inlined
def hash_17_to_128(address, length, seed, secret):
    total = u64(length) * PRIME64_1
    end = address + length
    for pair in range((length - 1) // 32, -1, -1):
        total += mix_16(address + 16 * pair, secret, 32 * pair, seed)
        total += mix_16(end - 16 * (pair + 1), secret, 32 * pair + 16, seed)
    return avalanche(total)


@inlined
def hash_129_to_240(address, length, seed, secret):
    total = u64(length) * PRIME64_1
    for i in range(8):
        total += mix_16(address + 16 * i, secret, 16 * i, seed)
    total = avalanche(total)
    for i in range(8, length // 16):
        total += mix_16(address + 16 * i, secret, 16 * (i - 8) + 3, seed)
    return avalanche(total + mix_16(address + length - 16, secret, 119, seed))


@inlined
def accumulate(lanes, address, secret, offset):
    for i in range(8):
        data = load64(address + 8 * i)
        key = data ^ secret_word(secret, offset + 8 * i)
        lanes[i ^ 1] += data
        lanes[i] += (key & LOW_32) * (key >> u64(32))


@inlined
def hash_long(address, length, secret, lanes):
    """Inputs above 240 bytes, with the seeded secret; ``lanes`` are eight words of scratch."""
    lanes[0], lanes[1], lanes[2], lanes[3] = PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3
    lanes[4], lanes[5], lanes[6], lanes[7] = PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1
    stripes = (length - 1) // 64
    for stripe in range(stripes):
        accumulate(lanes, address + 64 * stripe, secret, 8 * (stripe & 15))
        if stripe & 15 == 15:
            for i in range(8):
                lane = lanes[i]
                lanes[i] = (lane ^ (lane >> u64(47)) ^ secret[16 + i]) * PRIME32_1
    accumulate(lanes, address + length - 64, secret, 121)
    total = u64(length) * PRIME64_1
    for i in range(4):
        low = lanes[2 * i] ^ secret_word(secret, 11 + 16 * i)
        high = lanes[2 * i + 1] ^ secret_word(secret, 19 + 16 * i)
        total += multiply_fold(low, high)
    return avalanche(total)


@inlined
def hash_bytes(address, length, seed, secrets, lanes):
    if length <= 16:
        return hash_up_to_16(address, length, seed)
    if length <= 128:
        return hash_17_to_128(address, length, seed, secret_at(secrets))
    if length <= 240:
        return hash_129_to_240(address, length, seed, secret_at(secrets))
    return hash_long(address, length, secret_at(secrets + 8 * SEEDED), lanes)


@kernel(IN_U32, WORD, IN_U64)
def hash_words(words, seed, secrets):
    """XXH3-64 of the little-endian bytes of ``words``; ``secrets`` are ``secrets_for(seed)``."""
    lanes = np.empty(8, np.uint64)
    return hash_bytes(words.ctypes.data, words.shape[0] * 4, seed, secrets.ctypes.data, lanes)


@inlined
def roll(address, block_size, seed, secrets, parent, folds, hashes):
    """Rolling hashes of the consecutive blocks at ``address``; ``secrets`` is where ``secrets_for(seed)`` are."""
    lanes = np.empty(8, np.uint64)
    secret = secret_at(secrets)
    length = block_size * 4
    previous = parent
    for block in range(hashes.shape[0]):
        if length == 64:
            local = hash_17_to_128(address, 64, seed, secret)
        else:
            local = hash_bytes(address, length, seed, secrets, lanes)
        if block < folds.shape[0] and folds[block] != ZERO:
            local = hash_pair(local, folds[block], seed)
        if block > 0 or parent != ZERO:
            local = hash_pair(previous, local, seed)
        hashes[block] = local
        previous = local
        address += length


@kernel(IN_U32, INTEGER, WORD, IN_U64, WORD, IN_U64, OUT_U64)
def hash_chain(tokens, block_size, seed, secrets, parent, folds, hashes):
    """Rolling hashes of consecutive blocks into ``hashes``.

    ``parent`` is the hash before the first block (0: none); ``folds`` holds one word per block to be
    folded into its local hash (0: nothing), or is empty.
    """
    roll(tokens.ctypes.data, block_size, seed, secrets.ctypes.data, parent, folds, hashes)
