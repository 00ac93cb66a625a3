"""What outlives a process: where it is kept, and the index and its feeds as the last process left them."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from conductor.cli.event_feeds import EventFeeds
from conductor.config import Config
from conductor.configuration_faults import ConfigError
from conductor.index_snapshots import SNAPSHOT_NAME, IndexSnapshots, restore
from conductor.state_store import FileStateStore, MemoryStateStore, StateStore

REUSE_NAME = "reuse-snapshot"  # in the folder for state


@dataclass(frozen=True, slots=True)
class KeptState:
    """``snapshot`` is the index's file, ``reuse`` that of what the tier planner learned. None: nothing is kept."""

    store: StateStore
    snapshot: Path | None
    reuse: Path | None


def open_state(config: Config) -> KeptState:
    """ConfigError when the folder cannot be made."""
    if config.state_dir is None:
        return KeptState(MemoryStateStore(), None, None)
    try:
        folder = config.state_dir
        return KeptState(FileStateStore(folder), folder / SNAPSHOT_NAME, folder / REUSE_NAME)
    except OSError as error:
        raise ConfigError(
            f"state_dir: cannot make the folder {config.state_dir} ({error.strerror}); "
            "choose one that this user may write to"
        ) from None


def restored_feeds(
    config: Config,
    state: KeptState,
    clock: Callable[[], float],
    tls: ssl.SSLContext | None = None,
    taken_over: Path | None = None,
) -> tuple[EventFeeds, IndexSnapshots | None]:
    """The feeds over an index that has what the last process saved, and what saves it from now on.

    ``taken_over`` is a snapshot of another replica's index; it is later than what was saved here,
    and its file is removed.

    Neither is started. The feeds are to be closed before the snapshots.
    """
    bounds = config.index
    restored = restore(
        taken_over or state.snapshot, expected_blocks=bounds.expected_blocks, max_blocks=bounds.max_blocks
    )
    if taken_over is not None:
        taken_over.unlink()  # it is in memory now
    feeds = EventFeeds(restored.index, clock, tls)
    feeds.resume(restored.positions)
    if state.snapshot is None:
        return feeds, None
    interval_s = bounds.snapshot_interval_s
    return feeds, IndexSnapshots(state.snapshot, restored.index, feeds, interval_s=interval_s)
