"""The fields of an event, and what their values say."""

# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

import numpy as np

from cache_index.kernel_set import inlined, outlined
from cache_index.kernels.machine_words import LOW_32, ONE, ZERO, save32, secret_at, swap_bytes, u64
from cache_index.wire_kernels.layout import (
    BLOCK_HASHES,
    BLOCKS,
    CACHE_SALT,
    CLEAR,
    EVENT_HASHES,
    EVENT_TOKENS,
    EXTRA_KEYS,
    GROUP,
    KIND_ROWS,
    KINDS,
    KNOWN_FIELDS,
    LORA_ID,
    LORA_NAME,
    MEDIA,
    MEDIA_ROWS,
    MEDIUM,
    NAMES,
    NO_GROUP,
    PARENT,
    REMOVE,
    SIZE,
    SPEC_KIND,
    STORE,
    STREAM_DOMAIN,
    TOKEN_IDS,
    TOKENS,
    TYPE,
)
from cache_index.wire_kernels.msgpack import (
    HIGH_BITS,
    array_at,
    big_endian,
    byte_at,
    hash_at,
    integer_at,
    is_ascii,
    low_bytes,
    text_at,
    word_at,
    word_of,
)

_KEYS = {
    "type": TYPE,
    "block_hashes": BLOCK_HASHES,
    "parent_block_hash": PARENT,
    "token_ids": TOKEN_IDS,
    "block_size": SIZE,
    "lora_id": LORA_ID,
    "medium": MEDIUM,
    "lora_name": LORA_NAME,
    "extra_keys": EXTRA_KEYS,
    "group_idx": GROUP,
    "kv_cache_spec_kind": SPEC_KIND,
    "cache_salt": CACHE_SALT,
}
# per field: length of the key, first eight bytes, the eight bytes behind them, last eight bytes
_KEY_WORDS = np.array(
    [
        [
            len(key),
            word_of(key),
            word_of(key[8:16]),
            word_of(key[max(len(key) - 8, 0) :]),
        ]
        for key in (name.encode() for name in _KEYS)
    ],
    np.uint64,
)
BLOCK_STORED, BLOCK_REMOVED, ALL_CLEARED = b"BlockStored", b"BlockRemoved", b"AllBlocksCleared"
_STORED_HEAD, _STORED_TAIL = word_of(BLOCK_STORED), word_of(BLOCK_STORED[-8:])
_REMOVED_HEAD, _REMOVED_TAIL = word_of(BLOCK_REMOVED), word_of(BLOCK_REMOVED[-8:])
_CLEARED_HEAD, _CLEARED_TAIL = word_of(ALL_CLEARED), word_of(ALL_CLEARED[-8:])
NO_EVENT, UNKNOWN_EVENT = -1, 9
PARTIAL, WHOLE, NO_KIND = 0, 1, -1  # of a KV cache group: see cache_groups


@outlined
def field_named(begin, length):
    """Number of the field with this key, KNOWN_FIELDS for any other."""
    if length < 4 or length > 18:
        return np.int64(KNOWN_FIELDS)
    head = word_at(begin) & low_bytes(length)
    for field in range(KNOWN_FIELDS):
        if _KEY_WORDS[field, 0] == u64(length) and _KEY_WORDS[field, 1] == head:
            if length <= 8:
                return field
            if _KEY_WORDS[field, 3] == word_at(begin + length - 8) and (
                length <= 16 or _KEY_WORDS[field, 2] == word_at(begin + 8)
            ):
                return field
    return np.int64(KNOWN_FIELDS)


@outlined
def kind_at(at, end):
    """What kind of event its type names; NO_EVENT when that is no (plain) text."""
    length, begin = text_at(at, end)
    if begin < 0:
        return NO_EVENT
    if length >= 8:
        head, tail = word_at(begin), word_at(begin + length - 8)
        if length == 11 and head == _STORED_HEAD and tail == _STORED_TAIL:
            return STORE
        if length == 12 and head == _REMOVED_HEAD and tail == _REMOVED_TAIL:
            return REMOVE
        if length == 16 and head == _CLEARED_HEAD and tail == _CLEARED_TAIL:
            return CLEAR
    return UNKNOWN_EVENT if is_ascii(begin, length) else NO_EVENT


@inlined
def is_nil(at):
    """Whether a field is missing or null."""
    return at == 0 or byte_at(at) == 0xC0


@outlined
def tier_at(work, at, end):
    """The tier of a medium, -1: none given, -2: not known here."""
    if is_nil(at):
        return np.int64(-1)
    length, begin = text_at(at, end)
    if begin < 0 or length > 16:
        return np.int64(-2)
    first = word_at(begin) & low_bytes(length)
    second = word_at(begin + 8) & low_bytes(length - 8)
    if (first | second) & HIGH_BITS != ZERO:
        return np.int64(-2)
    first, second = upper_case(first), upper_case(second)
    media = secret_at(work[MEDIA])
    for row in range(work[MEDIA_ROWS]):
        if media[3 * row] == first and media[3 * row + 1] == second:
            return np.int64(media[3 * row + 2])
    return np.int64(-2)


@outlined
def group_at(at, end):
    """The number of a KV cache group, NO_GROUP: none given, -2: not known here."""
    if is_nil(at):
        return np.int64(NO_GROUP)
    value, negative, behind = integer_at(at, end)
    if behind < 0 or negative or value > LOW_32:
        return np.int64(-2)
    return np.int64(value)


@outlined
def spec_kind_at(work, at, end):
    """PARTIAL, WHOLE for kinds that are not in the table, NO_KIND: none given, -2: not known here."""
    if is_nil(at):
        return NO_KIND
    length, begin = text_at(at, end)
    if begin < 0:
        return -2
    kinds = secret_at(work[KINDS])
    for row in range(work[KIND_ROWS]):
        if kinds[4 * row] == u64(length):
            different = ZERO
            for word in range(3):
                named = word_at(begin + 8 * word) & low_bytes(length - 8 * word)
                different |= named ^ kinds[4 * row + 1 + word]
            if different == ZERO:
                return PARTIAL
    return WHOLE


@inlined
def upper_case(word):
    """Eight ASCII letters at once."""
    from_a = word + u64(0x1F1F1F1F1F1F1F1F)
    above_z = word + u64(0x0505050505050505)
    return word ^ ((from_a & ~above_z & HIGH_BITS) >> u64(2))


@outlined
def read_hashes(work, at, end):
    """Append an array of engine hashes to the names."""
    count, at = array_at(at, end)
    if at < 0:
        return at
    names = secret_at(work[NAMES] + 8 * work[BLOCKS])
    domain = u64(work[STREAM_DOMAIN])
    for i in range(count):
        if byte_at(at) == 0xCF and at + 9 <= end:
            value, at = big_endian(at + 1, 8), at + 9
        else:
            value, at = hash_at(at, end)
            if at < 0:
                return at
        names[i] = value ^ domain
    work[EVENT_HASHES] = count
    return at


@outlined
def read_tokens(work, at, end):
    """Read an array of token ids into the scratch."""
    count, begin = array_at(at, end)
    if begin < 0:
        return begin
    at = begin
    target = work[TOKENS]
    work[EVENT_TOKENS] = count
    # Without branches on the tag, which is as good as random. One of 0 to 0x7F is the value itself; 0xCC,
    # 0xCD and 0xCE announce 1, 2 and 4 bytes. Other tags are noticed at the end.
    strange = ZERO
    for i in range(count):
        if at >= end:
            return np.int64(-1)
        word = word_at(at)
        tag = word & u64(0xFF)
        size = (tag >> u64(7)) << (tag & u64(3))
        strange |= (tag >> u64(7)) & u64((tag - u64(0xCC)) > u64(2))
        bits = u64(8) * (size & u64(7))
        value = swap_bytes(word) >> ((u64(56) - bits) & u64(63))
        value &= ((ONE << bits) - ONE) | u64(0x7F)
        save32(target + 4 * i, np.int64(value))
        at += np.int64(size) + 1
    if strange == ZERO:
        return at if at <= end else np.int64(-1)
    at = begin
    for i in range(count):
        value, negative, at = integer_at(at, end)
        if at < 0 or negative or value > LOW_32:
            return np.int64(-1)
        save32(target + 4 * i, np.int64(value))
    return at
