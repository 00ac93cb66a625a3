"""Reading msgpack.

Readers take the address of a value and the end of its payload, and return the address behind the value,
or -1 when it is not what they read.
"""

# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from cache_index.kernel_set import inlined, outlined
from cache_index.kernels.machine_words import ONE, ZERO, instruction, swap_bytes, u64
from cache_index.wire_kernels.layout import MAX_NESTING, STACK


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


HIGH_BITS = np.uint64(0x8080808080808080)


def word_of(text: bytes) -> Any:
    return np.uint64(int.from_bytes(text[:8].ljust(8, b"\0"), "little"))


@inlined
def low_bytes(count):
    """Mask of the first ``count`` bytes of a word."""
    if count >= 8:
        return ~ZERO
    if count <= 0:
        return ZERO
    return (ONE << u64(8 * count)) - ONE


@inlined
def big_endian(address, size):
    """Unsigned integer of 1 to 8 bytes."""
    return swap_bytes(word_at(address)) >> u64(64 - 8 * size)


@outlined
def array_at(at, end):
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


@outlined
def map_at(at, end):
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


@outlined
def text_at(at, end):
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


@outlined
def is_ascii(begin, length):
    seen = ZERO
    at, left = begin, length
    while left > 0:
        seen |= word_at(at) & low_bytes(left)
        at += 8
        left -= 8
    return seen & HIGH_BITS == ZERO


@outlined
def integer_at(at, end):
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


@outlined
def hash_at(at, end):
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


@outlined
def skip(work, at, end):
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
