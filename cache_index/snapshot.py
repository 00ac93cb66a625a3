"""An index in one file: saved at a moment, loaded by a later process.

The header has holders, slots, counters and positions of streams; see `ArrayFile` for the rest.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cache_index import kernels as k
from cache_index.array_file import ArrayFile, SnapshotError
from cache_index.arrays import KernelArrays
from cache_index.radix import CacheIndex
from cache_index.replay import Position
from cache_index.residency import Holder, Tier
from cache_index.self_check import ensure_ready
from cache_index.streams import EngineTraits, StreamConfig, StreamPosition
from cache_index.table_memory import TableMemory

MAGIC = b"KVINDEX\n"
VERSION = 2
FILE = ArrayFile("a snapshot of a cache index", MAGIC, VERSION)
ROWS_AT_ONCE = 1 << 15  # well below a millisecond, for which the interpreter is held
TRIES_WITHOUT_LOCK = 4
TABLES = {
    name: getattr(k, name) for name in ("NODES", "LINKS", "SETS", "COPIES", "FANOUT", "GAPS", "ANCHORS")
}
POOLS = {name: getattr(k, name) for name in ("SET_POOL", "SMALL_POOL", "BITS_POOL")}
COUNTERS = {"dropped": k.DROPPED, "matches": k.MATCHES}
SLOT_ARRAYS = ("slot_holder", "slot_tier", "slot_blocks", "slot_gaps")
WHOLE_ARRAYS = ("gap_depths", "gap_bits", "heat")
ENTRY_BYTES = {name: k.ENTRY_BYTES[table] for name, table in TABLES.items()}


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What was in a file. The index is complete; ``positions`` say up to where it has which streams."""

    index: CacheIndex
    positions: tuple[StreamPosition, ...]

    def keep_streams(self) -> None:
        """Forget what no stream will continue: holders without a position, and tiers that none speaks for."""
        told: dict[Holder, set[Tier]] = {}
        for each in self.positions:
            tiers = each.config.tiers
            told.setdefault(each.config.holder, set()).update(Tier if tiers is None else tiers)
        holders = [Holder(*each) for each in self.index._slots.exported()["holders"] if each is not None]
        for holder in holders:
            if holder not in told:
                self.index.unregister(holder)
                continue
            for tier in Tier:
                if tier not in told[holder]:
                    self.index.clear(holder, tier)


@dataclass(frozen=True, slots=True)
class SaveReport:
    """``locked_s`` is for how long the index could not be used."""

    file_bytes: int
    took_s: float
    locked_s: float
    positions: tuple[StreamPosition, ...]


def _no_streams() -> AbstractContextManager[Sequence[StreamPosition]]:
    return nullcontext(())


def save(
    index: CacheIndex,
    path: str | Path,
    paused: Callable[[], AbstractContextManager[Sequence[StreamPosition]]] = _no_streams,
) -> SaveReport:
    """Write the whole index to ``path``, atomically, with the positions that ``paused`` gives.

    Nothing may be applied for those streams while its context lasts. The index is locked while its memory
    is copied, which takes milliseconds per hundred megabytes. OSError when the file cannot be written.
    """
    path = Path(path)
    started_s = time.perf_counter()
    header, arrays, positions, locked_s = _capture(index, paused)
    file_bytes = FILE.write(path, header, arrays)
    return SaveReport(file_bytes, time.perf_counter() - started_s, locked_s, positions)


def load(path: str | Path, *, expected_blocks: int = 0, max_blocks: int | None = None) -> Snapshot:
    """What was saved to ``path``, in an index of these bounds.

    SnapshotError for any file that is not a good snapshot.
    """
    ensure_ready()
    header, arrays = FILE.read(Path(path))
    try:
        index = _restored(header, arrays, CacheIndex(expected_blocks=expected_blocks, max_blocks=max_blocks))
        positions = tuple(_position(each) for each in header["positions"])
    except (LookupError, ValueError, TypeError, AttributeError) as error:
        raise SnapshotError(f"{path}: the content does not fit together: {error!r}") from error
    return Snapshot(index, positions)


def _capture(
    index: CacheIndex, paused: Callable[[], AbstractContextManager[Sequence[StreamPosition]]]
) -> tuple[dict[str, Any], dict[str, NDArray[Any]], tuple[StreamPosition, ...], float]:
    """The content at one moment. Memory is made before, and entries are picked after the index is locked."""
    arrays, tries = index._arrays, 0
    while True:
        copies = {name: _Copy(arrays, table) for name, table in TABLES.items()}
        tries += 1
        with paused() as streams, index._lock:
            locked_from_s = time.perf_counter()
            if not all(copy.fits() for copy in copies.values()):  # a table grew meanwhile
                if tries <= TRIES_WITHOUT_LOCK:
                    continue
                copies = {name: _Copy(arrays, table) for name, table in TABLES.items()}
            for copy in copies.values():
                copy.take()
            header, captured = _capture_small(index)
            positions = tuple(streams)
            locked_s = time.perf_counter() - locked_from_s
        break
    header["positions"] = [_described(each) for each in positions]
    packed = {name: copy.packed() for name, copy in copies.items()}
    return header, packed | captured, positions, locked_s


class _Copy:
    """The memory of a table, copied: taking it is all that happens with the index locked."""

    def __init__(self, arrays: KernelArrays, table: int) -> None:
        self._arrays = arrays
        self._table = table
        self._shape = self._present_shape()
        self._memory = TableMemory(4 * self._shape[0] * self._shape[1])
        self._memory.bytes[:] = 0  # pages are provided now, not when the index is locked

    def fits(self) -> bool:
        """Whether there is room for what the table is now."""
        rows, words = self._present_shape()
        return rows <= self._shape[0] and words == self._shape[1]

    def take(self) -> None:
        self._shape = self._present_shape()
        start, rows = 0, self._rows()
        for part in self._arrays.positions(self._table):
            rows[start : start + len(part)] = part
            start += len(part)

    def packed(self) -> NDArray[np.uint32]:
        """The entries of the copy, without the empty positions between them."""
        rows, kept = self._rows(), 0
        for start in range(0, len(rows), ROWS_AT_ONCE):
            some = rows[start : start + ROWS_AT_ONCE]
            filled = some[(some[:, 2] | some[:, 3]) != 0]
            rows[kept : kept + len(filled)] = filled
            kept += len(filled)
            time.sleep(0)  # other threads get the interpreter now
        return rows[:kept]

    def _rows(self) -> NDArray[np.uint32]:
        rows, words = self._shape
        return self._memory.bytes[: 4 * rows * words].view(np.uint32).reshape(rows, words)

    def _present_shape(self) -> tuple[int, int]:
        parts = self._arrays.positions(self._table)
        return sum(len(part) for part in parts), parts[0].shape[1]


def _capture_small(index: CacheIndex) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """Everything but the tables."""
    arrays, slots = index._arrays, index._slots
    state = arrays.state
    captured: dict[str, NDArray[Any]] = {name: arrays.pool(pool).copy() for name, pool in POOLS.items()}
    count = slots.numbers
    captured |= {name: getattr(arrays, name)[:count].copy() for name in SLOT_ARRAYS}
    captured["holder_slots"] = arrays.holder_slots[: slots.rows].copy()
    captured |= {name: getattr(arrays, name).copy() for name in WHOLE_ARRAYS}
    header = {
        "entry_bytes": ENTRY_BYTES,
        "slot_capacity": arrays.slot_capacity,
        "slots": slots.exported(),
        "pools": {
            name: [int(state[pool + k.LIVE]), int(state[pool + k.FREE])] for name, pool in POOLS.items()
        },
        "counters": {name: int(state[word]) for name, word in COUNTERS.items()},
    }
    return header, captured


def _described(streams: StreamPosition) -> dict[str, Any]:
    config, position = streams.config, streams.position
    return {
        "instance": config.holder.instance_id,
        "rank": config.holder.rank,
        "model": config.model,
        "endpoint": config.endpoint,
        "replay_endpoint": config.replay_endpoint,
        "topic": config.topic,
        "block_size": config.block_size,
        "tenant": config.tenant,
        "tiers": None if config.tiers is None else sorted(config.tiers),
        "last_sequence": position.last_sequence,
        "last_digest": position.last_digest.hex(),
        "complete": position.complete,
        "traits": asdict(streams.traits),
    }


def _position(described: dict[str, Any]) -> StreamPosition:
    fields = dict(described)
    position = Position(
        fields.pop("last_sequence"), bytes.fromhex(fields.pop("last_digest")), fields.pop("complete")
    )
    holder = Holder(fields.pop("instance"), fields.pop("rank"))
    traits, tiers = EngineTraits(**fields.pop("traits")), fields.pop("tiers")
    fields["tiers"] = None if tiers is None else frozenset(map(Tier, tiers))
    return StreamPosition(StreamConfig(holder, **fields), position, traits)


def _restored(header: dict[str, Any], captured: dict[str, NDArray[Any]], index: CacheIndex) -> CacheIndex:
    if header["entry_bytes"] != ENTRY_BYTES:
        raise ValueError("entries have another size in this version")
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
    while index.max_blocks is not None and arrays.used(k.NODES) > index.max_blocks:
        arrays.make_room()  # the bound is lower than it was
    return index
