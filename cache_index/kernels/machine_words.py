"""Machine words: what the processor has an instruction for, and Python has not."""

# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

u64 = np.uint64
LOW_32 = np.uint64(0xFFFFFFFF)
ZERO, ONE = np.uint64(0), np.uint64(1)


def instruction(function: Callable[..., Any]) -> Any:
    """A function that becomes the machine code its ``generate`` emits."""
    return intrinsic(function)


@instruction
def load64(_context: Any, address: Any) -> Any:
    def generate(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.load(builder.inttoptr(arguments[0], ir.IntType(64).as_pointer()), align=4)

    return types.uint64(types.int64), generate


@instruction
def load32(_context: Any, address: Any) -> Any:
    def generate(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        word = builder.load(builder.inttoptr(arguments[0], ir.IntType(32).as_pointer()), align=4)
        return builder.sext(word, ir.IntType(64))

    return types.int64(types.int64), generate


@instruction
def save64(_context: Any, address: Any, value: Any) -> Any:
    def generate(target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        builder.store(arguments[1], builder.inttoptr(arguments[0], ir.IntType(64).as_pointer()), align=4)
        return target.get_dummy_value()

    return types.void(types.int64, types.uint64), generate


@instruction
def save32(_context: Any, address: Any, value: Any) -> Any:
    def generate(target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        word = builder.trunc(arguments[1], ir.IntType(32))
        builder.store(word, builder.inttoptr(arguments[0], ir.IntType(32).as_pointer()), align=4)
        return target.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@instruction
def prefetch(_context: Any, address: Any) -> Any:
    def generate(target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        i32 = ir.IntType(32)
        pointer = ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [pointer, i32, i32, i32])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        read, high_locality, data = ir.Constant(i32, 0), ir.Constant(i32, 3), ir.Constant(i32, 1)
        builder.call(function, [builder.inttoptr(arguments[0], pointer), read, high_locality, data])
        return target.get_dummy_value()

    return types.void(types.int64), generate


@instruction
def leading_zeros(_context: Any, word: Any) -> Any:
    def generate(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.ctlz(arguments[0], ir.Constant(ir.IntType(1), 0))

    return types.uint64(types.uint64), generate


@instruction
def trailing_zeros(_context: Any, word: Any) -> Any:
    def generate(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 0))

    return types.int64(types.uint64), generate


@instruction
def swap_bytes(_context: Any, word: Any) -> Any:
    def generate(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.bswap(arguments[0])

    return types.uint64(types.uint64), generate


@instruction
def multiply_fold(_context: Any, a: Any, b: Any) -> Any:
    """Low half xor high half of the 128-bit product."""

    def generate(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        wide, word = ir.IntType(128), ir.IntType(64)
        product = builder.mul(builder.zext(arguments[0], wide), builder.zext(arguments[1], wide))
        high = builder.trunc(builder.lshr(product, ir.Constant(wide, 64)), word)
        return builder.xor(builder.trunc(product, word), high)

    return types.uint64(types.uint64, types.uint64), generate


@instruction
def words_at(_context: Any, address: Any) -> Any:
    """A pointer that can be indexed. Unlike an array it is passed on without counting references."""

    def generate(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())

    return types.CPointer(types.int64)(types.int64), generate


@instruction
def secret_at(_context: Any, address: Any) -> Any:
    """Like words_at, unsigned."""

    def generate(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())

    return types.CPointer(types.uint64)(types.int64), generate


def pointer(kind: Any, code: ir.Type) -> Any:
    """From an address to a pointer at numbers of a kind, which can be indexed, and made an array by ``carray``."""

    def function(_context: Any, address: Any) -> Any:
        def generate(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], code.as_pointer())

        return types.CPointer(kind)(types.int64), generate

    return instruction(function)


bytes_at = pointer(types.uint8, ir.IntType(8))
floats_at = pointer(types.float64, ir.DoubleType())
ids_at = pointer(types.uint32, ir.IntType(32))
