"""The memory behind the wire kernels: payloads, and the program that is made of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cache_index import kernels as k
from cache_index import wire_kernels as w
from cache_index.cache_groups import PARTIAL_KINDS
from cache_index.residency import _MEDIA

PAYLOADS_AT_ONCE = 1024
EXTRA_KEYS_BYTES = 1 << 12
SMALLEST_EVENT = 14  # bytes; bounds the number of operations in a payload


class Scratch:
    """Memory that the kernels work in; one per thread, shared by all streams that the thread applies."""

    def __init__(self, seed: int) -> None:
        self._array = np.zeros(w.WORK_WORDS, np.int64)
        self.address = int(self._array.ctypes.data)
        self.work = _integers(self._array)  # gives plain integers, and faster than the array does
        self._owned: dict[int, NDArray[Any]] = {}
        self._capacity = 0
        self.work[w.SEED] = seed
        self._own(w.SECRETS, k.secrets_for(seed))
        self._own(w.PLAIN_SECRETS, k.secrets_for(0))
        self._own(w.LANES, np.zeros(8, np.uint64))
        self._own(w.KEYS, np.zeros(EXTRA_KEYS_BYTES, np.uint8))
        self.work[w.KEYS_BYTES] = EXTRA_KEYS_BYTES
        self._own(w.MEDIA, _media())
        self.work[w.MEDIA_ROWS] = len(_MEDIA)
        self._own(w.KINDS, _kinds())
        self.work[w.KIND_ROWS] = len(PARTIAL_KINDS)
        self.work[w.MAIN_GROUP] = w.NO_GROUP
        self._ends = _integers(self._own(w.ENDS, np.zeros(PAYLOADS_AT_ONCE, np.int64)))
        self.slots = self._own(w.SLOTS, np.zeros(k.TIERS, np.int64))
        self._reserve(1 << 14)

    def load(self, payloads: Sequence[bytes]) -> None:
        """Make ``payloads``, at most PAYLOADS_AT_ONCE, the ones to be read."""
        joined = payloads[0] if len(payloads) == 1 else b"".join(payloads)
        if len(joined) > self._capacity:
            self._reserve(max(2 * self._capacity, len(joined)))
        self._bytes[: len(joined)] = joined
        end = 0
        for number, payload in enumerate(payloads):
            end += len(payload)
            self._ends[number] = end
        self.work[w.PAYLOADS] = len(payloads)

    def begin(self, first: int) -> None:
        """Empty the program; payloads are read into it from number ``first`` on."""
        work = self.work
        work[w.NEXT_PAYLOAD] = first
        work[w.OPERATIONS] = work[w.BLOCKS] = 0
        work[w.EVENTS] = work[w.UNKNOWN_EVENTS] = work[w.REFUSED_EVENTS] = work[w.OTHER_GROUP_EVENTS] = 0
        work[w.OPERATION] = work[w.DONE] = work[w.FETCHED] = work[w.UNRESOLVED] = 0

    def operation_tier(self) -> int:
        """Tier of the operation that is about to run."""
        return int(self._program[self.work[w.OPERATION], w.TIER])

    def _reserve(self, capacity: int) -> None:
        """Room for payloads of so many bytes, and for all blocks and tokens that could be in them."""
        self._capacity = capacity
        padded = capacity + w.PADDING
        self._bytes = self._own(w.BUFFER, np.zeros(padded, np.uint8)).data
        rows = np.zeros((padded // SMALLEST_EVENT, w.ROW_WORDS), np.int64)
        self._program = self._own(w.PROGRAM, rows)
        self._own(w.NAMES, np.zeros(padded, np.uint64))
        self._own(w.HASHES, np.zeros(padded, np.uint64))
        self._own(w.TOKENS, np.zeros(padded, np.uint32))

    def _own(self, word: int, array: NDArray[Any]) -> NDArray[Any]:
        self._owned[word] = array
        self.work[word] = array.ctypes.data
        return array


def _integers(array: NDArray[Any]) -> memoryview[int]:
    return array.data


def _media() -> NDArray[np.uint64]:
    rows = [(*_words(name, 2), int(tier)) for name, tier in _MEDIA.items()]
    return np.array(rows, np.uint64)


def _kinds() -> NDArray[np.uint64]:
    return np.array([(len(kind), *_words(kind, 3)) for kind in PARTIAL_KINDS], np.uint64)


def _words(text: str, count: int) -> list[int]:
    padded = text.encode().ljust(8 * count, b"\0")
    return [int.from_bytes(padded[start : start + 8], "little") for start in range(0, 8 * count, 8)]
