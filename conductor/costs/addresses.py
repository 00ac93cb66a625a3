"""Arrays by their addresses, for kernels: taking an array from Python costs more than many of them compute."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from cache_index.kernels.machine_words import instruction


def _pointer(kind: Any, code: ir.Type) -> Any:
    def function(_context: Any, address: Any) -> Any:
        def generate(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], code.as_pointer())

        return types.CPointer(kind)(types.int64), generate  # type: ignore[no-untyped-call]

    return instruction(function)


floats_at = _pointer(types.float64, ir.DoubleType())
integers_at = _pointer(types.int64, ir.IntType(64))
tokens_at = _pointer(types.int32, ir.IntType(32))
counts_at = _pointer(types.float32, ir.FloatType())
