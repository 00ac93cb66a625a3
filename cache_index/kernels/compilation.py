"""The set of the index's kernels, and the types of their arguments."""

from __future__ import annotations

from pathlib import Path

from numba import types

from cache_index.kernel_set import KernelSet

SOURCES = tuple(sorted(Path(__file__).parent.glob("*.py")))
KERNELS = KernelSet(*SOURCES)
CACHE_DIRECTORY = KERNELS.directory
kernel, compile_all = KERNELS.kernel, KERNELS.compile_all

STATE = types.int64  # address of the state
INTEGER = types.int64
WORD = types.uint64
IN_I32 = types.Array(types.int32, 1, "C", readonly=True)
IN_I64 = types.Array(types.int64, 1, "C", readonly=True)
IN_ROWS = types.Array(types.int64, 2, "C", readonly=True)
IN_U64 = types.Array(types.uint64, 1, "C", readonly=True)
IN_U32 = types.Array(types.uint32, 1, "C", readonly=True)
OUT_U64 = types.Array(types.uint64, 1, "C")
OUT_I32 = types.Array(types.int32, 2, "C")
