"""Writes a recording to disk on a thread of its own, in bounded memory.

A recording can be replayed only without gaps. So when the disk is too slow, full, or the file has reached its
limit, it ends there: what comes later is counted, and said in the log, the metrics and the last line.
"""

from __future__ import annotations

import threading
from collections import deque
from pathlib import Path
from typing import BinaryIO, Final

import structlog

from conductor.journal import End, Frame, Header, encode

_log = structlog.get_logger(__name__)

DEFAULT_MAX_BYTES: Final = 4 << 30
_MAX_WAITING: Final = 50_000  # frames
_WAKE_S: Final = 0.2
_BATCH: Final = 1_000


class JournalWriter:
    """One file. A former recording of the same name is kept beside it as NAME.1."""

    def __init__(
        self,
        path: Path,
        header: Header,
        *,
        max_bytes: int = DEFAULT_MAX_BYTES,
        max_waiting: int = _MAX_WAITING,
    ) -> None:
        """Raises OSError when the file cannot be made."""
        if path.exists() and path.stat().st_size:
            path.replace(path.with_name(path.name + ".1"))
        self.path = path
        self._file: BinaryIO = path.open("wb")
        self._max_bytes = max_bytes
        self._max_waiting = max_waiting
        self._waiting: deque[Frame] = deque()
        self._closing = threading.Event()
        self.ended: str | None = None  # why nothing more is recorded
        self.frames = 0
        self.bytes = 0
        self.dropped = 0
        self._write(encode(header) + b"\n")
        self._thread = threading.Thread(target=self._write_forever, name="journal", daemon=True)
        self._thread.start()

    def put(self, frame: Frame) -> None:
        """Record a frame; never waits for the disk."""
        if self.ended is None and len(self._waiting) >= self._max_waiting:
            self._end(f"the disk is too slow: {len(self._waiting)} events were waiting to be written")
        if self.ended is not None:
            self.dropped += 1
        else:
            self._waiting.append(frame)

    def close(self) -> None:
        """Write what waits, and the last line."""
        self._closing.set()
        self._thread.join()

    def _write_forever(self) -> None:
        try:
            while not self._closing.wait(_WAKE_S):
                self._write_waiting()
            self._write_waiting()
            self._write(encode(End(self.ended or "closed", self.dropped)) + b"\n")
        except Exception as error:
            self._end(f"writing failed: {error}")
            self.dropped += len(self._waiting)
            self._waiting.clear()
        finally:
            self._file.close()

    def _write_waiting(self) -> None:
        while self._waiting:
            lines: list[bytes] = []
            while self._waiting and len(lines) < _BATCH:
                lines.append(encode(self._waiting.popleft()))
            lines.append(b"")
            block = b"\n".join(lines)
            if self.bytes + len(block) > self._max_bytes:
                self._end(f"the file has reached its limit of {self._max_bytes} bytes")
                self.dropped += len(lines) - 1 + len(self._waiting)
                self._waiting.clear()
                return
            self._write(block)
            self.frames += len(lines) - 1
        self._file.flush()

    def _write(self, block: bytes) -> None:
        self._file.write(block)
        self.bytes += len(block)

    def _end(self, reason: str) -> None:
        if self.ended is None:
            self.ended = reason
            _log.error("decisions are no longer recorded", path=str(self.path), reason=reason)
