"""Compiled kernels from an engine's bytes to the index: msgpack batches are read, hashed and applied.

It happens in two steps. ``read_payloads`` turns the payloads of one stream into a *program*: rows of
OPERATIONS, one after the other in the order of the events, with the engine's names and the local hashes
of their blocks. It touches no index and needs no lock. ``run_program`` applies a program, a bounded piece
per call, so that the caller can let others have the index in between.

The reader takes the usual forms only, and whole payloads only: where anything is unusual, truncated or
malformed it leaves that payload out of the program and says so. ``events.decode_batch`` then decides what
it is. So what this reader accepts must mean the same there; what it rejects needs no care.

Both kernels work on one ``int64`` array, the *work* (``wire.py`` owns it), with the layout below. Payloads
lie in one buffer with PADDING bytes behind the last, so that words may be loaded across a payload's end;
what lies behind it is never interpreted. The program's arrays have room for as many blocks and tokens as
the buffer has bytes, which is more than any payload can hold.
"""

# mypy: disable-error-code="no-any-return, arg-type, assignment, attr-defined, operator, no-untyped-call"

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, njit, types

from cache_index import kernels as k
from cache_index.kernel_cache import cache_directory, cached_njit

u64 = np.uint64
inlined, instruction = k.inlined, k.instruction
ONE, ZERO = k.ONE, k.ZERO

PADDING = 64
MAX_NESTING = 8
LOOKAHEAD = 24  # blocks whose links are fetched before they are needed
REMOVALS_AT_ONCE = 64  # blocks whose nodes are fetched before they are removed
MAX_BLOCK_SIZE = 1 << 24

# --- layout of the work ------------------------------------------------------------------------------

(
    BUFFER,  # address of the payloads
    ENDS,  # int64 per payload: where it ends in the buffer
    PAYLOADS,
    NEXT_PAYLOAD,  # the first one that is not in the program
    PROGRAM,  # rows of operations
    OPERATIONS,
    FIRST_OPERATION,  # of the payload being read
    NAMES,  # uint64 per block: engine hash ^ stream domain
    HASHES,  # uint64 per block: local hash, later sequence hash
    BLOCKS,
    TOKENS,  # uint32: scratch for the tokens of one event
    MEDIA,  # rows of two words of name and the tier
    MEDIA_ROWS,
    NAMESPACES,  # rows of block size, adapter and domain
    NAMESPACE_ROWS,
    BLOCK_SIZE,  # that events must have, 0: any
    STREAM_DOMAIN,
    SEED,
    SECRETS,  # for SEED
    PLAIN_SECRETS,  # for seed 0
    KEYS,  # scratch for the canonical form of extra keys
    KEYS_BYTES,
    KEYS_USED,
    LANES,  # eight words of scratch
    EVENTS,  # counters, of payloads in the program
    UNKNOWN_EVENTS,
    REFUSED_EVENTS,
    SLOTS,  # int64 per tier: slot of the holder, -1: none
    OPERATION,  # the next one to run, and how many of its blocks are done
    DONE,
    BUDGET,  # blocks that the call may still apply
    APPLIED,
    UNRESOLVED,
    FETCHED,  # blocks whose links are on their way
    EVENT_HASHES,  # of the event being read
    EVENT_TOKENS,
) = range(36)
FIELDS = 40  # address of each field's value in the event being read, 0: not there
STACK = 56
WORK_WORDS = 72

TYPE, BLOCK_HASHES, PARENT, TOKEN_IDS, SIZE, LORA_ID, MEDIUM, LORA_NAME, EXTRA_KEYS, CACHE_SALT = range(10)
KNOWN_FIELDS = 10
LAST_POSITION = EXTRA_KEYS  # arrays have the fields up to this one, in this order

# a row of the program
KIND, TIER, START, COUNT, HAS_PARENT, PARENT_NAME, DOMAIN = range(7)
ROW_WORDS = 8
STORE, CHAINED, REMOVE, CLEAR = range(4)  # CHAINED: a store whose hashes are sequence hashes by now
EVERY_TIER = -1

# what run_program returns
FINISHED, BUDGET_SPENT, NO_ROOM, NO_SLOT, CLEARING = range(5)

# --- bytes -------------------------------------------------------------------------------------------


@instruction
def byte_at(_context: Any, address: Any) -> Any:
    def generate(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        byte = builder.load(builder.inttoptr(arguments[0], ir.IntType(8).as_pointer()), align=1)
        return builder.zext(byte, ir.IntType(64))

    return types.int64(types.int64), generate


@instruction
def word_at(_context: Any, address: Any) -> Any:
    """Eight bytes from any address, the first one lowest."""

    def generate(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.load(builder.inttoptr(arguments[0], ir.IntType(64).as_pointer()), align=1)

    return types.uint64(types.int64), generate


@instruction
def put_word(_context: Any, address: Any, word: Any) -> Any:
    def generate(target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        builder.store(arguments[1], builder.inttoptr(arguments[0], ir.IntType(64).as_pointer()), align=1)
        return target.get_dummy_value()

    return types.void(types.int64, types.uint64), generate


# --- registration ------------------------------------------------------------------------------------

CACHE_DIRECTORY = cache_directory(Path(k.__file__), Path(__file__))
_KERNELS: list[tuple[Any, tuple[Any, ...]]] = []


def kernel(*signature: Any) -> Callable[[Callable[..., Any]], Any]:
    """A function that Python calls, with one signature."""

    def register(function: Callable[..., Any]) -> Any:
        dispatcher = cached_njit(function, CACHE_DIRECTORY)
        _KERNELS.append((dispatcher, signature))
        return dispatcher

    return register


def part(function: Callable[..., Any]) -> Any:
    """A function that only kernels call, too large to be compiled into each place."""
    return njit(error_model="numpy")(function)


def compile_all() -> None:
    """Compile every kernel, or load it from the cache, and close the set of signatures."""
    for dispatcher, signature in _KERNELS:
        if not dispatcher.signatures:
            dispatcher.compile(signature)
            dispatcher.disable_compile()


# --- msgpack -----------------------------------------------------------------------------------------
#
# Readers take the address of a value and the end of its payload, and return the address behind the value,
# or -1 when it is not what they read.

HIGH_BITS = np.uint64(0x8080808080808080)


def _word_of(text: bytes) -> Any:
    return np.uint64(int.from_bytes(text[:8].ljust(8, b"\0"), "little"))


@inlined
def low_bytes(count):  # type: ignore[no-untyped-def]
    """Mask of the first ``count`` bytes of a word."""
    if count >= 8:
        return ~ZERO
    if count <= 0:
        return ZERO
    return (ONE << u64(8 * count)) - ONE


@inlined
def big_endian(address, size):  # type: ignore[no-untyped-def]
    """Unsigned integer of 1 to 8 bytes."""
    return k.swap_bytes(word_at(address)) >> u64(64 - 8 * size)


@part
def array_at(at, end):  # type: ignore[no-untyped-def]
    """(number of items, address of the first)."""
    tag = byte_at(at)
    count, begin = np.int64(0), np.int64(-1)
    if at < end:
        if tag & 0xF0 == 0x90:
            count, begin = tag & 15, at + 1
        elif tag == 0xDC:
            count, begin = np.int64(big_endian(at + 1, 2)), at + 3
        elif tag == 0xDD:
            count, begin = np.int64(big_endian(at + 1, 4)), at + 5
    if begin < 0 or begin + count > end:
        return np.int64(0), np.int64(-1)
    return count, begin


@part
def map_at(at, end):  # type: ignore[no-untyped-def]
    """(number of pairs, address of the first)."""
    tag = byte_at(at)
    count, begin = np.int64(0), np.int64(-1)
    if at < end:
        if tag & 0xF0 == 0x80:
            count, begin = tag & 15, at + 1
        elif tag == 0xDE:
            count, begin = np.int64(big_endian(at + 1, 2)), at + 3
        elif tag == 0xDF:
            count, begin = np.int64(big_endian(at + 1, 4)), at + 5
    if begin < 0 or begin + 2 * count > end:
        return np.int64(0), np.int64(-1)
    return count, begin


@part
def text_at(at, end):  # type: ignore[no-untyped-def]
    """(bytes, address of the first); any bytes, also such as are no text."""
    tag = byte_at(at)
    length, begin = np.int64(0), np.int64(-1)
    if at < end:
        if tag & 0xE0 == 0xA0:
            length, begin = tag & 31, at + 1
        elif tag == 0xD9:
            length, begin = byte_at(at + 1), at + 2
        elif tag == 0xDA:
            length, begin = np.int64(big_endian(at + 1, 2)), at + 3
        elif tag == 0xDB:
            length, begin = np.int64(big_endian(at + 1, 4)), at + 5
    if begin < 0 or begin + length > end:
        return np.int64(0), np.int64(-1)
    return length, begin


@part
def is_ascii(begin, length):  # type: ignore[no-untyped-def]
    seen = ZERO
    at, left = begin, length
    while left > 0:
        seen |= word_at(at) & low_bytes(left)
        at += 8
        left -= 8
    return seen & HIGH_BITS == ZERO


@part
def integer_at(at, end):  # type: ignore[no-untyped-def]
    """(two's complement, whether negative, address behind)."""
    tag = byte_at(at)
    value, negative, behind = ZERO, False, np.int64(-1)
    if at < end:
        if tag < 0x80:
            value, behind = u64(tag), at + 1
        elif tag >= 0xE0:
            value, negative, behind = u64(tag - 256), True, at + 1
        elif 0xCC <= tag <= 0xCF:
            size = np.int64(1) << (tag - 0xCC)
            value, behind = big_endian(at + 1, size), at + 1 + size
        elif 0xD0 <= tag <= 0xD3:
            size = np.int64(1) << (tag - 0xD0)
            value = big_endian(at + 1, size)
            negative = value >> u64(8 * size - 1) != ZERO
            if negative:
                value |= ~low_bytes(size)
            behind = at + 1 + size
    if behind > end:
        behind = np.int64(-1)
    return value, negative, behind


@part
def hash_at(at, end):  # type: ignore[no-untyped-def]
    """(engine hash, address behind): an integer of any kind, or the last eight bytes of a digest."""
    tag = byte_at(at)
    if tag < 0xC4 or tag > 0xC6 or at >= end:
        value, _, behind = integer_at(at, end)
        return value, behind
    size = np.int64(1) << (tag - 0xC4)
    length = np.int64(big_endian(at + 1, size))
    behind = at + 1 + size + length
    if at + 1 + size > end or length < 8 or behind > end:
        return ZERO, np.int64(-1)
    return big_endian(behind - 8, 8), behind


@part
def skip(work, at, end):  # type: ignore[no-untyped-def]
    """Behind any value. Leaves alone: maps that are not empty, texts beyond ASCII, timestamps."""
    depth = 0
    left = np.int64(1)
    while True:
        while left == 0:
            if depth == 0:
                return at
            depth -= 1
            left = work[STACK + depth]
        left -= 1
        if at >= end:
            return np.int64(-1)
        tag = byte_at(at)
        if tag <= 0x80 or tag >= 0xE0 or tag == 0xC0 or tag == 0xC2 or tag == 0xC3:
            at += 1
        elif tag & 0xF0 == 0x90 or tag == 0xDC or tag == 0xDD:
            count, at = array_at(at, end)
            if at < 0 or depth == MAX_NESTING:
                return np.int64(-1)
            work[STACK + depth] = left
            depth += 1
            left = count
        elif 0xA0 <= tag < 0xC0 or 0xD9 <= tag <= 0xDB:
            length, at = text_at(at, end)
            if at < 0 or not is_ascii(at, length):
                return np.int64(-1)
            at += length
        elif 0xCC <= tag <= 0xD3:
            at += 1 + (np.int64(1) << (tag & 3))
        elif tag == 0xCA:
            at += 5
        elif tag == 0xCB:
            at += 9
        elif 0xC4 <= tag <= 0xC6:
            size = np.int64(1) << (tag - 0xC4)
            at += 1 + size + np.int64(big_endian(at + 1, size))
        elif 0xD4 <= tag <= 0xD8 and byte_at(at + 1) != 0xFF:
            at += 2 + (np.int64(1) << (tag - 0xD4))
        elif 0xC7 <= tag <= 0xC9:
            size = np.int64(1) << (tag - 0xC7)
            if byte_at(at + 1 + size) == 0xFF:
                return np.int64(-1)
            at += 2 + size + np.int64(big_endian(at + 1, size))
        else:
            return np.int64(-1)
        if at > end:
            return np.int64(-1)


# --- the parts of an event ---------------------------------------------------------------------------

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
    "cache_salt": CACHE_SALT,
}
# per field: length of the key, first eight bytes, eight bytes from the middle, last eight bytes
_KEY_WORDS = np.array(
    [
        [
            len(key),
            _word_of(key),
            _word_of(key[max(len(key) - 9, 0) :]),
            _word_of(key[max(len(key) - 8, 0) :]),
        ]
        for key in (name.encode() for name in _KEYS)
    ],
    np.uint64,
)
BLOCK_STORED, BLOCK_REMOVED, ALL_CLEARED = b"BlockStored", b"BlockRemoved", b"AllBlocksCleared"
_STORED_HEAD, _STORED_TAIL = _word_of(BLOCK_STORED), _word_of(BLOCK_STORED[-8:])
_REMOVED_HEAD, _REMOVED_TAIL = _word_of(BLOCK_REMOVED), _word_of(BLOCK_REMOVED[-8:])
_CLEARED_HEAD, _CLEARED_TAIL = _word_of(ALL_CLEARED), _word_of(ALL_CLEARED[-8:])
NO_EVENT, UNKNOWN_EVENT = -1, 9


@part
def field_named(begin, length):  # type: ignore[no-untyped-def]
    """Number of the field with this key, KNOWN_FIELDS for any other."""
    if length < 4 or length > 17:
        return np.int64(KNOWN_FIELDS)
    head = word_at(begin) & low_bytes(length)
    for field in range(KNOWN_FIELDS):
        if _KEY_WORDS[field, 0] == u64(length) and _KEY_WORDS[field, 1] == head:
            if length <= 8:
                return field
            if _KEY_WORDS[field, 3] == word_at(begin + length - 8) and (
                length < 17 or _KEY_WORDS[field, 2] == word_at(begin + length - 9)
            ):
                return field
    return np.int64(KNOWN_FIELDS)


@part
def kind_at(at, end):  # type: ignore[no-untyped-def]
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
def is_nil(at):  # type: ignore[no-untyped-def]
    """Whether a field is missing or null."""
    return at == 0 or byte_at(at) == 0xC0


@part
def tier_at(work, at, end):  # type: ignore[no-untyped-def]
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
    media = k.secret_at(work[MEDIA])
    for row in range(work[MEDIA_ROWS]):
        if media[3 * row] == first and media[3 * row + 1] == second:
            return np.int64(media[3 * row + 2])
    return np.int64(-2)


@inlined
def upper_case(word):  # type: ignore[no-untyped-def]
    """Eight ASCII letters at once."""
    from_a = word + u64(0x1F1F1F1F1F1F1F1F)
    above_z = word + u64(0x0505050505050505)
    return word ^ ((from_a & ~above_z & HIGH_BITS) >> u64(2))


@part
def read_hashes(work, at, end):  # type: ignore[no-untyped-def]
    """Append an array of engine hashes to the names."""
    count, at = array_at(at, end)
    if at < 0:
        return at
    names = k.secret_at(work[NAMES] + 8 * work[BLOCKS])
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


@part
def read_tokens(work, at, end):  # type: ignore[no-untyped-def]
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
        value = k.swap_bytes(word) >> ((u64(56) - bits) & u64(63))
        value &= ((ONE << bits) - ONE) | u64(0x7F)
        k.save32(target + 4 * i, np.int64(value))
        at += np.int64(size) + 1
    if strange == ZERO:
        return at if at <= end else np.int64(-1)
    at = begin
    for i in range(count):
        value, negative, at = integer_at(at, end)
        if at < 0 or negative or value > k.LOW_32:
            return np.int64(-1)
        k.save32(target + 4 * i, np.int64(value))
    return at


# --- extra keys --------------------------------------------------------------------------------------
#
# Their canonical form is that of ``hashing.canonical_hash``; here only lists of texts occur.

LIST_TAG, TEXT_TAG = _word_of(b"list"), _word_of(b"text")


@part
def add_text(work, begin, length):  # type: ignore[no-untyped-def]
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


@part
def canonical_hash(work):  # type: ignore[no-untyped-def]
    lanes = k.secret_at(work[LANES])
    return k.hash_bytes(work[KEYS], work[KEYS_USED], ZERO, work[PLAIN_SECRETS], lanes)


@part
def same_text(first, first_length, second, second_length):  # type: ignore[no-untyped-def]
    if first_length != second_length:
        return False
    for offset in range(0, first_length, 8):
        different = word_at(first + offset) ^ word_at(second + offset)
        if different & low_bytes(first_length - offset) != ZERO:
            return False
    return True


@part
def fold_list(work, keys):  # type: ignore[no-untyped-def]
    """Fold of the ``keys`` texts in the scratch, behind the eight bytes left free for the list."""
    put_word(work[KEYS], LIST_TAG | (u64(keys) << u64(32)))
    return canonical_hash(work)


@part
def fold_extra_keys(work, at, end, blocks, adapter, adapter_length):  # type: ignore[no-untyped-def]
    """Fold each block's extra keys into its local hash; the adapter (-1: none) does not count.

    Returns 1 when the first block has keys, 0 when not, -1 when there are others than texts.
    """
    count, at = array_at(at, end)
    if at < 0 or count != blocks:
        return np.int64(-1)
    hashes = k.secret_at(work[HASHES] + 8 * work[BLOCKS])
    first_has_keys = np.int64(0)
    for block in range(blocks):
        if byte_at(at) == 0xC0 and at < end:
            at += 1
            continue
        items, at = array_at(at, end)
        if at < 0:
            return np.int64(-1)
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
            hashes[block] = k.hash_pair(hashes[block], fold_list(work, keys), u64(work[SEED]))
            if block == 0:
                first_has_keys = np.int64(1)
    return first_has_keys


# --- events ------------------------------------------------------------------------------------------


@part
def read_field(work, field, at, end):  # type: ignore[no-untyped-def]
    """Note a field's value, and read hashes and tokens at once."""
    if work[FIELDS + field] != 0:
        return np.int64(-1)  # twice
    work[FIELDS + field] = at
    if field == BLOCK_HASHES:
        return read_hashes(work, at, end)
    if field == TOKEN_IDS:
        return read_tokens(work, at, end)
    return skip(work, at, end)


@inlined
def append(work, kind, tier, blocks):  # type: ignore[no-untyped-def]
    """A new row of the program; returns it."""
    row = k.words_at(work[PROGRAM] + 8 * ROW_WORDS * work[OPERATIONS])
    work[OPERATIONS] += 1
    row[KIND] = kind
    row[TIER] = tier
    row[START] = work[BLOCKS]
    row[COUNT] = blocks
    work[BLOCKS] += blocks
    return row


@part
def add_removal(work, end):  # type: ignore[no-untyped-def]
    """Engines send one event per block: removals from one tier in a row become one operation."""
    if work[FIELDS + BLOCK_HASHES] == 0:
        return False
    tier = tier_at(work, work[FIELDS + MEDIUM], end)
    if tier == -2:
        return False
    tier = max(tier, np.int64(0))
    last = work[OPERATIONS] - 1
    if last >= work[FIRST_OPERATION]:
        row = k.words_at(work[PROGRAM] + 8 * ROW_WORDS * last)
        if row[KIND] == REMOVE and row[TIER] == tier:
            row[COUNT] += work[EVENT_HASHES]
            work[BLOCKS] += work[EVENT_HASHES]
            return True
    append(work, REMOVE, tier, work[EVENT_HASHES])
    return True


@part
def domain_of(work, block_size, adapter):  # type: ignore[no-untyped-def]
    """(domain, whether this namespace is known here)."""
    namespaces = k.secret_at(work[NAMESPACES])
    for row in range(work[NAMESPACE_ROWS]):
        if namespaces[3 * row] == u64(block_size) and namespaces[3 * row + 1] == adapter:
            return namespaces[3 * row + 2], True
    return ZERO, False


@part
def hash_blocks(work, blocks, block_size):  # type: ignore[no-untyped-def]
    """Local hashes of the event's blocks."""
    hashes = k.secret_at(work[HASHES] + 8 * work[BLOCKS])
    seed = u64(work[SEED])
    secret = k.secret_at(work[SECRETS])
    address, length = work[TOKENS], 4 * block_size
    if block_size == 16:
        for block in range(blocks):
            hashes[block] = k.hash_17_to_128(address + 64 * block, 64, seed, secret)
        return
    lanes = k.secret_at(work[LANES])
    for block in range(blocks):
        hashes[block] = k.hash_bytes(address + length * block, length, seed, work[SECRETS], lanes)


@part
def add_store(work, end):  # type: ignore[no-untyped-def]
    blocks = work[EVENT_HASHES]
    if work[FIELDS + BLOCK_HASHES] == 0 or work[FIELDS + TOKEN_IDS] == 0 or work[FIELDS + SIZE] == 0:
        return False
    size, negative, behind = integer_at(work[FIELDS + SIZE], end)
    if behind < 0 or negative or size == ZERO or size > u64(MAX_BLOCK_SIZE) or blocks == 0:
        return False
    block_size = np.int64(size)
    if work[EVENT_TOKENS] != blocks * block_size:
        return False
    parent = ZERO
    has_parent = not is_nil(work[FIELDS + PARENT])
    if has_parent:
        parent, behind = hash_at(work[FIELDS + PARENT], end)
        if behind < 0:
            return False
        parent ^= u64(work[STREAM_DOMAIN])
    tier = tier_at(work, work[FIELDS + MEDIUM], end)
    if tier == -2:
        return False

    adapter_word, adapter, adapter_length = ZERO, np.int64(-1), np.int64(0)
    if not is_nil(work[FIELDS + LORA_NAME]):
        adapter_length, adapter = text_at(work[FIELDS + LORA_NAME], end)
        work[KEYS_USED] = 0
        if adapter < 0 or not add_text(work, adapter, adapter_length):
            return False
        adapter_word = canonical_hash(work)
    elif not is_nil(work[FIELDS + LORA_ID]):
        return False

    hash_blocks(work, blocks, block_size)
    first_has_keys = np.int64(0)
    if not is_nil(work[FIELDS + EXTRA_KEYS]):
        keys = work[FIELDS + EXTRA_KEYS]
        first_has_keys = fold_extra_keys(work, keys, end, blocks, adapter, adapter_length)
        if first_has_keys < 0:
            return False
    if not is_nil(work[FIELDS + CACHE_SALT]):
        length, begin = text_at(work[FIELDS + CACHE_SALT], end)
        if begin < 0 or first_has_keys != 0:
            return False
        if length > 0 and not has_parent:
            work[KEYS_USED] = 8
            if not add_text(work, begin, length):
                return False
            hashes = k.secret_at(work[HASHES] + 8 * work[BLOCKS])
            hashes[0] = k.hash_pair(hashes[0], fold_list(work, 1), u64(work[SEED]))

    if work[BLOCK_SIZE] != 0 and block_size != work[BLOCK_SIZE]:
        work[REFUSED_EVENTS] += 1
        return True
    domain, known = domain_of(work, block_size, adapter_word)
    if not known:
        return False
    row = append(work, STORE, max(tier, np.int64(0)), blocks)
    row[HAS_PARENT] = 1 if has_parent else 0
    row[PARENT_NAME] = np.int64(parent)
    row[DOMAIN] = np.int64(domain)
    return True


@part
def add_event(work, kind, end):  # type: ignore[no-untyped-def]
    """Put the event whose fields are noted into the program."""
    if kind == UNKNOWN_EVENT:
        work[UNKNOWN_EVENTS] += 1
        return True
    work[EVENTS] += 1
    if kind == REMOVE:
        return add_removal(work, end)
    if kind == STORE:
        return add_store(work, end)
    tier = tier_at(work, work[FIELDS + MEDIUM], end)
    if tier == -2:
        return False
    append(work, CLEAR, tier, 0)
    return True


@part
def read_event(work, at, end):  # type: ignore[no-untyped-def]
    for field in range(KNOWN_FIELDS):
        work[FIELDS + field] = 0
    count, begin = map_at(at, end)
    if begin >= 0:
        at = begin
        for _ in range(count):
            length, begin = text_at(at, end)
            if begin < 0:
                return np.int64(-1)
            at = begin + length
            field = field_named(begin, length)
            if field < KNOWN_FIELDS:
                at = read_field(work, field, at, end)
            elif is_ascii(begin, length):
                at = skip(work, at, end)
            else:
                return np.int64(-1)
            if at < 0:
                return at
        if work[FIELDS + TYPE] == 0:
            return np.int64(-1)
        kind = kind_at(work[FIELDS + TYPE], end)
    else:
        count, at = array_at(at, end)
        if at < 0 or count == 0:
            return np.int64(-1)
        kind = kind_at(at, end)
        at = skip(work, at, end)
        for position in range(1, count):
            if at < 0:
                return at
            field = np.int64(KNOWN_FIELDS)
            if kind == STORE and position <= LAST_POSITION:
                field = position
            elif kind == REMOVE and position <= 2:
                field = BLOCK_HASHES if position == 1 else MEDIUM
            elif kind == CLEAR and position == 1:
                field = MEDIUM
            at = read_field(work, field, at, end) if field < KNOWN_FIELDS else skip(work, at, end)
    if at < 0 or kind == NO_EVENT or not add_event(work, kind, end):
        return np.int64(-1)
    return at


@part
def read_payload(work, at, end):  # type: ignore[no-untyped-def]
    """Put a batch into the program; whether it could be read to its end."""
    count, at = array_at(at, end)
    if at < 0 or count < 2:
        return False
    tag = byte_at(at)  # a number: of any kind of integer, or a float
    if not (tag < 0x80 or tag >= 0xE0 or 0xCA <= tag <= 0xD3):
        return False
    at = skip(work, at, end)
    if at < 0:
        return False
    events, at = array_at(at, end)
    if at < 0:
        return False
    for _ in range(events):
        at = read_event(work, at, end)
        if at < 0:
            return False
    if count > 2:
        if byte_at(at) != 0xC0:
            _, _, behind = integer_at(at, end)
            if behind < 0:
                return False
        for _ in range(2, count):
            at = skip(work, at, end)
            if at < 0:
                return False
    return at == end


@kernel(types.int64)
def read_payloads(work_address):  # type: ignore[no-untyped-def]
    """Put payloads into the program, from NEXT_PAYLOAD on up to the first that cannot be read here."""
    work = k.words_at(work_address)
    ends = k.words_at(work[ENDS])
    payload = work[NEXT_PAYLOAD]
    while payload < work[PAYLOADS]:
        operations, blocks = work[OPERATIONS], work[BLOCKS]
        events, unknown, refused = work[EVENTS], work[UNKNOWN_EVENTS], work[REFUSED_EVENTS]
        work[FIRST_OPERATION] = operations
        begin = ends[payload - 1] if payload > 0 else 0
        if not read_payload(work, work[BUFFER] + begin, work[BUFFER] + ends[payload]):
            work[OPERATIONS], work[BLOCKS] = operations, blocks
            work[EVENTS], work[UNKNOWN_EVENTS], work[REFUSED_EVENTS] = events, unknown, refused
            break
        payload += 1
    work[NEXT_PAYLOAD] = payload
    return payload


# --- application -------------------------------------------------------------------------------------


@inlined
def fetch_links(state, work, names, stop):  # type: ignore[no-untyped-def]
    """Ask for the links of the program's blocks before ``stop``, and some more."""
    stop = min(stop + LOOKAHEAD, work[BLOCKS])
    for i in range(work[FETCHED], stop):
        k.prefetch_entry(state, k.LINKS, names[i], 16)
    work[FETCHED] = max(work[FETCHED], stop)


@part
def chain(work, row, parent, state, names):  # type: ignore[no-untyped-def]
    """Turn an operation's local hashes into sequence hashes."""
    hashes = k.secret_at(work[HASHES] + 8 * row[START])
    seed, domain = u64(work[SEED]), u64(row[DOMAIN])
    previous = parent
    for block in range(row[COUNT]):
        if block > 0 or parent != ZERO:
            previous = k.hash_pair(previous, hashes[block], seed)
            hashes[block] = previous
        else:
            previous = hashes[block]
        if block < k.PREFETCH_AHEAD:
            k.prefetch_entry(state, k.NODES, previous ^ domain, k.NODE_BYTES)
    row[KIND] = CHAINED
    row[PARENT_NAME] = np.int64(parent)


@part
def run_removal(address, work, row, slot, names):  # type: ignore[no-untyped-def]
    """Go on with a removal as far as budget and room reach; returns the block reached."""
    state = k.words_at(address)
    stop = min(row[COUNT], work[DONE] + work[BUDGET])
    done = work[DONE]
    while done < stop:
        some = min(stop, done + REMOVALS_AT_ONCE)
        fetch_links(state, work, names, row[START] + some)
        for i in range(row[START] + done, row[START] + some):
            key = k.load64(k.find(state, k.LINKS, names[i], 16) + 8)
            k.prefetch_entry(state, k.NODES, key, k.NODE_BYTES)
        view = carray(k.secret_at(work[NAMES] + 8 * row[START]), (some,))
        reached, unknown = k.remove_linked(address, slot, view, done)
        work[UNRESOLVED] += unknown
        done = reached
        if reached < some:
            break
    return done


@kernel(types.int64, types.int64)
def run_program(address, work_address):  # type: ignore[no-untyped-def]
    """Apply operations until the budget is spent or the caller has to do something first.

    After NO_ROOM the caller makes room, after NO_SLOT it makes a slot for the tier of the next operation,
    after CLEARING it clears that operation's tier and steps over it; then it calls again.
    """
    state, work = k.words_at(address), k.words_at(work_address)
    names = k.secret_at(work[NAMES])
    slots = k.words_at(work[SLOTS])
    while work[OPERATION] < work[OPERATIONS]:
        if work[BUDGET] <= 0:
            return BUDGET_SPENT
        row = k.words_at(work[PROGRAM] + 8 * ROW_WORDS * work[OPERATION])
        kind, count = row[KIND], row[COUNT]
        if kind == CLEAR:
            return CLEARING
        slot = slots[row[TIER]]
        reached = count
        if kind == REMOVE:
            if slot >= 0:
                reached = run_removal(address, work, row, slot, names)
        else:
            if kind == STORE:
                fetch_links(state, work, names, row[START] + count)
                parent = ZERO
                if row[HAS_PARENT] != 0:
                    parent = k.resolve(address, u64(row[PARENT_NAME]))
                    if parent == ZERO:
                        work[UNRESOLVED] += count
                        work[OPERATION] += 1
                        continue
                    parent ^= u64(row[DOMAIN])
                chain(work, row, parent, state, names)
            if slot < 0:
                return NO_SLOT
            stop = min(count, work[DONE] + work[BUDGET])
            hashes = carray(k.secret_at(work[HASHES] + 8 * row[START]), (stop,))
            view = carray(k.secret_at(work[NAMES] + 8 * row[START]), (stop,))
            parent = u64(row[PARENT_NAME])
            reached = k.store(address, slot, hashes, view, u64(row[DOMAIN]), parent, work[DONE])
        applied = reached - work[DONE]
        work[APPLIED] += applied
        work[BUDGET] -= applied
        if reached < count:
            work[DONE] = reached
            return BUDGET_SPENT if work[BUDGET] <= 0 else NO_ROOM
        work[DONE] = 0
        work[OPERATION] += 1
    return FINISHED
