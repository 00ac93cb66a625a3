"""Compiled kernels from an engine's bytes to the index: msgpack batches are read, hashed and applied.

It happens in two steps. ``read_payloads`` turns the payloads of one stream into a *program*: rows of
OPERATIONS, one after the other in the order of the events, with the engine's names and the local hashes
of their blocks. It touches no index and needs no lock. ``run_program`` applies a program, a bounded piece
per call, so that the caller can let others have the index in between.

The reader takes the usual forms only, and whole payloads only: where anything is unusual, truncated or
malformed it leaves that payload out of the program and says so. ``events.decode_batch`` then decides what
it is. So what this reader accepts must mean the same there; what it rejects needs no care.
"""

from cache_index.wire_kernels.compilation import CACHE_DIRECTORY, compile_all
from cache_index.wire_kernels.events import read_payloads
from cache_index.wire_kernels.layout import *  # noqa: F403
from cache_index.wire_kernels.program import run_program

__all__ = [
    "CACHE_DIRECTORY",
    "compile_all",
    "read_payloads",
    "run_program",
]
