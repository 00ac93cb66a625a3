"""Arrays and a header in one file: written atomically, and read whole or not at all.

Layout: eight bytes of magic, format version and header length (u32 each), the header (JSON: what the writer says,
and name, type and shape of every array), the arrays one after the other, each padded to eight bytes, and at the
end the XXH3-64 of all that stands before. Everything is little-endian.

The checksum guards against accidents, not against somebody who writes such files on purpose.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from io import BufferedIOBase
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cache_index import kernels as k

PREFIX_BYTES = 16
PIECE_BYTES = 1 << 24

Arrays = dict[str, NDArray[Any]]


class SnapshotError(RuntimeError):
    """A file is no snapshot that this version can load; the message says why."""


@dataclass(frozen=True, slots=True)
class ArrayFile:
    """A kind of file: ``what`` it is said to be, with eight bytes of ``magic``."""

    what: str
    magic: bytes
    version: int

    def write(self, path: Path, header: Mapping[str, Any], arrays: Arrays) -> int:
        """Returns the bytes written. OSError when the file cannot be written; the one before stays then."""
        unfinished = path.with_name(f".{path.name}.unfinished")
        try:
            with unfinished.open("wb") as file:
                self._write(file, header, arrays)
                file.flush()
                os.fsync(file.fileno())
                file_bytes = file.tell()
            unfinished.replace(path)
        except BaseException:
            unfinished.unlink(missing_ok=True)
            raise
        return file_bytes

    def read(self, path: Path) -> tuple[dict[str, Any], Arrays]:
        """SnapshotError for any file that is not good."""
        try:
            with path.open("rb") as file:
                return self._read(file)
        except OSError as error:
            raise SnapshotError(f"cannot read {path}: {error.strerror or error}") from error
        except SnapshotError as error:
            raise SnapshotError(f"{path}: {error}") from None

    def _write(self, file: BufferedIOBase, header: Mapping[str, Any], arrays: Arrays) -> None:
        described = {name: [array.dtype.str, list(array.shape)] for name, array in arrays.items()}
        encoded = json.dumps({**header, "byte_order": sys.byteorder, "arrays": described}).encode()
        encoded += b" " * (-len(encoded) % 8)
        checksum = Checksum()
        lengths = self.version.to_bytes(4, "little") + len(encoded).to_bytes(4, "little")
        head = [np.frombuffer(piece, np.uint8) for piece in (self.magic + lengths, encoded)]
        for content in (*head, *map(_padded, arrays.values())):
            for piece in _pieces(content):
                file.write(piece)
                checksum.add(piece)
                time.sleep(0)  # other threads get the interpreter now
        file.write(checksum.digest())

    def _read(self, file: BufferedIOBase) -> tuple[dict[str, Any], Arrays]:
        size = os.fstat(file.fileno()).st_size
        prefix = file.read(PREFIX_BYTES)
        if prefix[: len(self.magic)] != self.magic[: len(prefix)] or not prefix:
            raise SnapshotError(f"not {self.what}")
        if len(prefix) < PREFIX_BYTES:
            raise SnapshotError("truncated within its first bytes")
        version = int.from_bytes(prefix[8:12], "little")
        if version != self.version:
            age = "newer" if version > self.version else "older"
            raise SnapshotError(
                f"has format version {version}, which is {age} than {self.version}, the one supported"
            )
        header_bytes = int.from_bytes(prefix[12:16], "little")
        if PREFIX_BYTES + header_bytes + 8 > size:
            raise SnapshotError("truncated within its header, or the header's length is corrupt")
        encoded = file.read(header_bytes)
        checksum = Checksum()
        checksum.add(prefix)
        checksum.add(encoded)
        try:
            header = json.loads(encoded)
            described = {
                name: (np.dtype(kind), tuple(shape)) for name, (kind, shape) in header["arrays"].items()
            }
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


def _padded(array: NDArray[Any]) -> NDArray[np.uint8]:
    content = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return np.pad(content, (0, -len(content) % 8)) if len(content) % 8 else content


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
