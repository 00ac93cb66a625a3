"""Arrays by their addresses, for kernels: taking an array from Python costs more than many of them compute."""

from __future__ import annotations

from llvmlite import ir
from numba import types

from cache_index.kernels.machine_words import floats_at as floats_at
from cache_index.kernels.machine_words import pointer

integers_at = pointer(types.int64, ir.IntType(64))
tokens_at = pointer(types.int32, ir.IntType(32))
counts_at = pointer(types.float32, ir.FloatType())
