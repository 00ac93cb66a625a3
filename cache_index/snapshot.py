"""An index in one file: saved at a moment, loaded by a later process.

Layout: eight bytes of magic, format version and header length (u32 each), the header (JSON: holders,
slots, counters, and name, type and shape of every array), the arrays one after the other, each padded to
eight bytes, and at the end the XXH3-64 of all that stands before. Everything is little-endian.

The checksum guards against accidents, not against somebody who writes such files on purpose.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from io import BufferedIOBase
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cache_index import kernels as k
from cache_index.arrays import NO_LIMIT
from cache_index.radix import CacheIndex
from cache_index.self_check import ensure_ready

MAGIC = b"KVINDEX\n"
VERSION = 1
PREFIX_BYTES = 16
PIECE_BYTES = 1 << 24
TABLES = {
    name: getattr(k, name) for name in ("NODES", "LINKS", "SETS", "COPIES", "FANOUT", "GAPS", "ANCHORS")
}
POOLS = {name: getattr(k, name) for name in ("SET_POOL", "SMALL_POOL", "BITS_POOL")}
COUNTERS = {"dropped": k.DROPPED, "matches": k.MATCHES}
SLOT_ARRAYS = ("slot_holder", "slot_tier", "slot_blocks", "slot_gaps")
WHOLE_ARRAYS = ("gap_depths", "gap_bits", "heat")


class SnapshotError(RuntimeError):
    """A file is no snapshot that this version can load; the message says why."""


def save(index: CacheIndex, path: str | Path) -> None:
    """Write the whole index to ``path``, atomically. The index is locked while its entries are copied."""
    path = Path(path)
    with index._lock:
        header, arrays = _capture(index)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            _write(file, header, arrays)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def load(path: str | Path) -> CacheIndex:
    """The index that was saved to ``path``. SnapshotError for any file that is not a good snapshot."""
    ensure_ready()
    try:
        with Path(path).open("rb") as file:
            header, arrays = _read(file)
    except OSError as error:
        raise SnapshotError(f"cannot read {path}: {error}") from error
    except SnapshotError as error:
        raise SnapshotError(f"{path}: {error}") from None
    try:
        return _restored(header, arrays)
    except (KeyError, ValueError, TypeError) as error:
        raise SnapshotError(f"{path}: the content does not fit together: {error!r}") from error


def _capture(index: CacheIndex) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    arrays, slots = index._arrays, index._slots
    state = arrays.state
    captured: dict[str, NDArray[Any]] = {name: arrays.packed(table) for name, table in TABLES.items()}
    captured |= {name: arrays.pool(pool).copy() for name, pool in POOLS.items()}
    count = slots.numbers
    captured |= {name: getattr(arrays, name)[:count].copy() for name in SLOT_ARRAYS}
    captured["holder_slots"] = arrays.holder_slots[: slots.rows].copy()
    captured |= {name: getattr(arrays, name).copy() for name in WHOLE_ARRAYS}
    limit = int(state[k.MAX_BLOCKS])
    header = {
        "max_blocks": None if limit == NO_LIMIT else limit,
        "slot_capacity": arrays.slot_capacity,
        "slots": slots.exported(),
        "pools": {
            name: [int(state[pool + k.LIVE]), int(state[pool + k.FREE])] for name, pool in POOLS.items()
        },
        "counters": {name: int(state[word]) for name, word in COUNTERS.items()},
    }
    return header, captured


def _restored(header: dict[str, Any], captured: dict[str, NDArray[Any]]) -> CacheIndex:
    index = CacheIndex(max_blocks=header["max_blocks"])
    arrays, slots = index._arrays, index._slots
    arrays.ensure_slots(header["slot_capacity"])
    for name in SLOT_ARRAYS:
        getattr(arrays, name)[: len(captured[name])] = captured[name]
    arrays.ensure_holders(len(captured["holder_slots"]))
    arrays.holder_slots[: len(captured["holder_slots"])] = captured["holder_slots"]
    slots.restore(header["slots"])
    for name in WHOLE_ARRAYS:
        getattr(arrays, name)[...] = captured[name]
    for name, pool in POOLS.items():
        live, free = header["pools"][name]
        arrays.refill_pool(pool, captured[name], live, free)
    for name, table in TABLES.items():
        arrays.refill(table, captured[name])
    for name, word in COUNTERS.items():
        arrays.state[word] = header["counters"][name]
    return index


def _write(file: BufferedIOBase, header: dict[str, Any], arrays: dict[str, NDArray[Any]]) -> None:
    described = {name: [array.dtype.str, list(array.shape)] for name, array in arrays.items()}
    encoded = json.dumps({**header, "byte_order": sys.byteorder, "arrays": described}).encode()
    encoded += b" " * (-len(encoded) % 8)
    checksum = Checksum()
    lengths = VERSION.to_bytes(4, "little") + len(encoded).to_bytes(4, "little")
    head = [np.frombuffer(piece, np.uint8) for piece in (MAGIC + lengths, encoded)]
    for content in (*head, *map(_padded, arrays.values())):
        for piece in _pieces(content):
            file.write(piece)
            checksum.add(piece)
    file.write(checksum.digest())


def _padded(array: NDArray[Any]) -> NDArray[np.uint8]:
    content = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return np.pad(content, (0, -len(content) % 8)) if len(content) % 8 else content


def _read(file: BufferedIOBase) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    size = os.fstat(file.fileno()).st_size
    prefix = file.read(PREFIX_BYTES)
    if prefix[: len(MAGIC)] != MAGIC[: len(prefix)] or not prefix:
        raise SnapshotError("not a snapshot of a cache index")
    if len(prefix) < PREFIX_BYTES:
        raise SnapshotError("truncated within its first bytes")
    version = int.from_bytes(prefix[8:12], "little")
    if version != VERSION:
        age = "newer" if version > VERSION else "older"
        raise SnapshotError(f"has format version {version}, which is {age} than {VERSION}, the one supported")
    header_bytes = int.from_bytes(prefix[12:16], "little")
    if PREFIX_BYTES + header_bytes + 8 > size:
        raise SnapshotError("truncated within its header, or the header's length is corrupt")
    encoded = file.read(header_bytes)
    checksum = Checksum()
    checksum.add(prefix)
    checksum.add(encoded)
    try:
        header = json.loads(encoded)
        described = {name: (np.dtype(kind), tuple(shape)) for name, (kind, shape) in header["arrays"].items()}
        counts = {name: _count(shape) for name, (_, shape) in described.items()}
    except (ValueError, KeyError, TypeError) as error:
        raise SnapshotError("corrupt: its header cannot be read") from error
    expected = PREFIX_BYTES + header_bytes + 8
    expected += sum(-(-counts[name] * kind.itemsize // 8) * 8 for name, (kind, _) in described.items())
    if size != expected:
        problem = "truncated" if size < expected else "corrupt: too long"
        raise SnapshotError(f"{problem}: {size} bytes instead of {expected}")
    arrays = {}
    for name, (kind, shape) in described.items():
        content = np.empty(-(-counts[name] * kind.itemsize // 8) * 8, np.uint8)
        for piece in _pieces(content):
            if file.readinto(piece) != len(piece):
                raise SnapshotError("truncated while it was read")
            checksum.add(piece)
        arrays[name] = content[: counts[name] * kind.itemsize].view(kind).reshape(shape)
    if file.read(8) != checksum.digest():
        raise SnapshotError("corrupt: its checksum does not fit its content")
    if header.get("byte_order") != sys.byteorder:
        raise SnapshotError(f"written on a {header.get('byte_order')}-endian machine")
    return header, arrays


def _count(shape: tuple[Any, ...]) -> int:
    count = 1
    for length in shape:
        if not isinstance(length, int) or length < 0:
            raise ValueError("a length is no natural number")
        count *= length
    return count


def _pieces(content: NDArray[np.uint8]) -> Iterator[memoryview]:
    for start in range(0, len(content), PIECE_BYTES):
        yield content[start : start + PIECE_BYTES].data


class Checksum:
    """XXH3-64 of the XXH3-64 of the pieces added, whose division is fixed by the format."""

    def __init__(self) -> None:
        self._hashes: list[int] = []

    def add(self, piece: bytes | memoryview) -> None:
        words = np.frombuffer(piece, np.uint32)
        self._hashes.append(int(k.hash_words(words, np.uint64(0), k.secrets_for(0))))

    def digest(self) -> bytes:
        hashes = np.array(self._hashes, np.uint64).view(np.uint32)
        return int(k.hash_words(hashes, np.uint64(0), k.secrets_for(0))).to_bytes(8, "little")
