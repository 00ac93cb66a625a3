"""The index in a file: loaded when a process starts, saved every now and then and at its end.

Only what a stream can continue exactly comes back: streams whose engine can replay. Everything else starts
empty, so nothing is believed that nobody will correct.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

import structlog

from cache_index import CacheIndex, Snapshot, SnapshotError, StreamPosition, load, save

_log = structlog.get_logger(__name__)

SNAPSHOT_NAME = "index-snapshot"  # in the folder for state


class ResumableStreams(Protocol):
    """Streams that can tell where they are, and be continued there."""

    def paused(self) -> AbstractContextManager[Sequence[StreamPosition]]: ...

    def resume(self, positions: Sequence[StreamPosition]) -> None: ...


def restore(path: Path | None, *, expected_blocks: int = 0, max_blocks: int | None = None) -> Snapshot:
    """What was saved to ``path`` and streams can continue; an empty index, and why in the log, if that fails."""
    if path is not None and path.exists():
        started_s = time.perf_counter()
        try:
            snapshot = load(path, expected_blocks=expected_blocks, max_blocks=max_blocks)
        except SnapshotError as error:
            _log.warning("the index snapshot is ignored, the index starts empty", reason=str(error))
        else:
            snapshot.keep_streams()
            _log.info(
                "index loaded",
                streams=len(snapshot.positions),
                residencies=snapshot.index.stats().residencies,
                took_s=round(time.perf_counter() - started_s, 3),
            )
            return snapshot
    return Snapshot(CacheIndex(expected_blocks=expected_blocks, max_blocks=max_blocks), ())


class IndexSnapshots:
    """Saves an index to one file, on a thread of its own. A failure is logged and counted, and tried again."""

    def __init__(
        self, path: Path, index: CacheIndex, streams: ResumableStreams, *, interval_s: float
    ) -> None:
        self._path = path
        self._index = index
        self._streams = streams
        self._interval_s = interval_s
        self._saved: tuple[StreamPosition, ...] | None = None  # positions in the file
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._save_forever, name="index-snapshots", daemon=True)
        self.saves = 0
        self.failures = 0
        self.file_bytes = 0
        self.locked_s = 0.0  # by the last one
        self.took_s = 0.0

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Save for the last time. The streams are closed by then."""
        self._closing.set()
        if self._thread.ident is not None:
            self._thread.join()
        self.save()

    def save(self) -> None:
        """Save now, unless no stream has brought anything since the last time."""
        with self._streams.paused() as positions:
            unchanged = tuple(positions) == self._saved
        if unchanged and self._path.exists():
            return
        try:
            report = save(self._index, self._path, self._streams.paused)
        except OSError as error:
            self.failures += 1
            _log.error("the index cannot be saved", path=str(self._path), reason=str(error))
            return
        self._saved = report.positions
        self.saves += 1
        self.file_bytes, self.locked_s, self.took_s = report.file_bytes, report.locked_s, report.took_s

    def _save_forever(self) -> None:
        while not self._closing.wait(self._interval_s):
            try:
                self.save()
            except Exception:
                self.failures += 1
                _log.exception("the index cannot be saved", path=str(self._path))
