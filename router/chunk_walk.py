"""Compiled: over the chunks of a streamed response that arrived in one piece, many at a time."""

# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from numba import types

from cache_index.kernel_set import KernelSet, entry_point

_KERNELS = KernelSet(Path(__file__))
_INTEGER = types.int64
_BYTES = types.Array(types.uint8, 1, "C", readonly=True)
_MOST_DIGITS = 15


@_KERNELS.kernel(_BYTES, _INTEGER, _INTEGER)
def _walk(data, pos, remaining):
    """Walk on from ``pos``, where ``remaining`` bytes of a chunk are still to come, its line end included.

    Returns behind which byte whole chunks end, how far it came, and what remains of the chunk there. It stops
    before a size line that is not simply a number, not complete, or the last one.
    """
    size = len(data)
    boundary = pos
    while pos < size:
        if remaining > 0:
            if remaining > size - pos:
                return boundary, size, remaining - (size - pos)
            pos += remaining
            boundary = pos
            remaining = 0
            continue
        chunk_bytes = 0
        at = pos
        while at < size:
            digit = data[at]
            if 48 <= digit <= 57:
                chunk_bytes = chunk_bytes * 16 + digit - 48
            elif 97 <= digit <= 102 or 65 <= digit <= 70:
                chunk_bytes = chunk_bytes * 16 + (digit & 7) + 9
            else:
                break
            at += 1
        ends = at + 1 < size and data[at] == 13 and data[at + 1] == 10
        if not ends or chunk_bytes == 0 or at - pos > _MOST_DIGITS:
            return boundary, pos, 0
        pos = at + 2
        remaining = chunk_bytes + 2
    return boundary, pos, remaining


def compiled_walk() -> Callable[..., tuple[int, int, int]]:
    _KERNELS.compile_all()
    return entry_point(_walk)
