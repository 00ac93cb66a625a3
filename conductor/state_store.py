"""Where state that outlives a process is kept. In-process nothing is shared; a folder survives restarts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Protocol


class StateStore(Protocol):
    """Small named values, each written whole."""

    def get(self, key: str) -> bytes | None: ...

    def put(self, key: str, value: bytes) -> None: ...


class MemoryStateStore:
    """Forgets with the process."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}

    def get(self, key: str) -> bytes | None:
        return self._values.get(key)

    def put(self, key: str, value: bytes) -> None:
        self._values[key] = value


class FileStateStore:
    """One file a key in a folder, replaced atomically. Raises ValueError for a key that is no plain name."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def get(self, key: str) -> bytes | None:
        path = self._path(key)
        return path.read_bytes() if path.exists() else None

    def put(self, key: str, value: bytes) -> None:
        path = self._path(key)
        unfinished = path.with_suffix(".unfinished")
        unfinished.write_bytes(value)
        unfinished.replace(path)

    def _path(self, key: str) -> Path:
        if not re.fullmatch(r"[a-z0-9_-]+", key):
            raise ValueError(f"state key {key!r} must be lower-case letters, digits, - and _")
        return self._folder / key
