"""What a prefill would do to the requests aboard a rank: how many of them would miss their TBT objective.

A step that carries prompt chunks is a long gap for every request that decodes there. TBT is the mean of the longest
``tbt_share`` of a request's gaps, so an answer of ``n`` tokens bears ``tbt_share * n * (objective - step)`` seconds
of prefill beside it. How long it will be is not known. Lengths being about geometric, an answer that has ``age``
tokens by now, and is to reach ``needed`` before it has room for what it bears, does so with the probability
``exp(-(needed - age) / mean)``. The requests placed on a rank are prefilled in order, so what each has to bear is
what was placed there after it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from struct import Struct
from typing import Final, cast

import numpy as np
from numba import types
from numba.np.numpy_support import carray

from cache_index.kernel_cache import cache_directory, cached_njit
from cache_index.kernel_set import compiled
from conductor.costs import addresses, kernels
from conductor.costs import tables as t
from conductor.costs.addresses import floats_at, integers_at
from conductor.costs.instance_class import Floats

_DIRECTORY = cache_directory(
    *(Path(file) for file in (__file__, addresses.__file__, kernels.__file__, t.__file__))
)

_FIRST_SLOTS: Final = 8
# ---- columns of a slot ----
_PLACED_S: Final = 0  # prefill placed on the rank when its own had been
_BEGAN_S: Final = 1  # its first token; infinity before
_LONG_S: Final = 2  # of what was placed, what made gaps longer than its objective
_MEAN_TOKENS: Final = 3  # of the answer, as predicted
_OBJECTIVE_S: Final = 4  # for its TBT
_COLUMNS: Final = 5

# They write a slot, or its first two columns, in less than half the time of assignments.
_pack_slot: Final[Callable[..., None]] = Struct(f"{_COLUMNS}d").pack_into
_pack_beginning: Final[Callable[..., None]] = Struct("2d").pack_into
_SLOT_BYTES: Final = 8 * _COLUMNS


class Exposure:
    """The requests that decode on one rank, or will. Ids that are not known (any more) are ignored."""

    __slots__ = ("_address", "_expose", "_ids", "_long_s", "_placed_s", "_slots", "_table", "_words")

    def __init__(self) -> None:
        self._ids: list[str] = []
        self._slots: dict[str, int] = {}
        self._set_table(np.zeros((_FIRST_SLOTS, _COLUMNS)))
        self._placed_s = 0.0  # prefill ever placed here, as predicted
        self._long_s = 0.0
        self._expose = compiled(_expose, *_SIGNATURE)

    def __len__(self) -> int:
        return len(self._ids)

    def _set_table(self, table: Floats) -> None:
        self._table = table
        self._address = int(table.ctypes.data)
        self._words = cast(
            "memoryview[float]", table.reshape(-1).data
        )  # from which single numbers are read faster

    def placed(
        self, placement_id: str, prefill_s: float, output_tokens: int, tbt_objective_s: float, long: bool
    ) -> None:
        """A request is to decode here, after ``prefill_s`` of prefill here; 0 if it prefills elsewhere.

        ``long`` if steps that carry this prefill last longer than the TBT objective.
        """
        self._placed_s += prefill_s
        if long:
            self._long_s += prefill_s
        slot = self._slots[placement_id] = len(self._ids)
        self._ids.append(placement_id)
        if slot == len(self._table):
            self._set_table(np.concatenate([self._table, np.zeros_like(self._table)]))
        _pack_slot(
            self._words,
            slot * _SLOT_BYTES,
            self._placed_s,
            math.inf,
            self._long_s,
            output_tokens,
            tbt_objective_s,
        )

    def began(self, placement_id: str, queue_s: float, now_s: float) -> None:
        """Its first token is out; ``queue_s`` of prefills are waiting or running here."""
        slot = self._slots.get(placement_id)
        if slot is not None:
            _pack_beginning(self._words, slot * _SLOT_BYTES, self._placed_s - queue_s, now_s)

    def ended(self, placement_id: str, queue_s: float) -> float:
        """It is over; returns how many seconds of prefill ran beside its decode, as predicted."""
        slot = self._slots.pop(placement_id, None)
        if slot is None:
            return 0.0
        words, first = self._words, slot * _COLUMNS
        borne_s = self._placed_s - queue_s - words[first + _PLACED_S]
        last = self._ids.pop()
        if last != placement_id:
            self._ids[slot] = last
            self._slots[last] = slot
            moved = len(self._ids) * _COLUMNS
            words[first : first + _COLUMNS] = words[moved : moved + _COLUMNS]
        return 0.0 if borne_s < 0.0 else borne_s

    def write(self, tables: t.ClusterTables, row: int, tbt_share: float, now_s: float) -> None:
        """Write the columns HARM of the rank's row of the load table, from the others of it."""
        self._expose(
            self._address,
            len(self._ids),
            self._placed_s,
            self._long_s,
            tbt_share,
            now_s,
            tables.loads_address,
            tables.ranks_address,
            tables.classes_address,
            row,
        )


def _expose(
    table_address: int,
    count: int,
    placed_s: float,
    long_s: float,
    tbt_share: float,
    now_s: float,
    loads_address: int,
    ranks_address: int,
    classes_address: int,
    row: int,
) -> None:
    table = carray(floats_at(table_address), (count, _COLUMNS))
    loads = carray(floats_at(loads_address), (row + 1, t.LOAD_COLUMNS))
    class_id = integers_at(ranks_address)[row * t.RANK_COLUMNS + t.CLASS]
    speeds = carray(floats_at(classes_address), (class_id + 1, t.CLASS_COLUMNS))[class_id]
    load = loads[row]
    queue_s = kernels.queue_s(loads, row, now_s)
    step_s = speeds[t.DECODE_SCALE] * (
        speeds[t.DECODE_BASE_S]
        + speeds[t.DECODE_S_PER_SEQUENCE] * load[t.ACTIVE_DECODES]
        + speeds[t.DECODE_S_PER_CONTEXT] * load[t.CONTEXT_TOKENS]
    )
    harm = load[t.HARM : t.REPORTED_RUNNING]
    harm[:] = 0.0
    for slot in range(count):
        spare_s = tbt_share * (table[slot, _OBJECTIVE_S] - step_s)  # prefill that each token makes bearable
        if spare_s <= 0.0:
            continue
        borne_s = placed_s - table[slot, _PLACED_S]
        age = 0.0
        if table[slot, _BEGAN_S] < now_s:
            age = max(now_s - table[slot, _BEGAN_S] - max(borne_s - queue_s, 0.0), 0.0) / step_s
        mean = table[slot, _MEAN_TOKENS]
        lacking = (long_s - table[slot, _LONG_S]) / spare_s - age
        if lacking >= 0.0:  # the same for all, and exponentials are what takes the time here
            hope = math.exp(-lacking / mean)
            left = math.exp(-t.HARM_AT_S[0] / (spare_s * mean))
            for k in range(len(t.HARM_AT_S)):
                harm[k] += hope * (1.0 - left)
                left = (left * left) * (left * left)
            continue
        for k in range(len(t.HARM_AT_S)):
            then = lacking + t.HARM_AT_S[k] / spare_s
            if then > 0.0:
                harm[k] += 1.0 - math.exp(-then / mean)


_expose = cached_njit(_expose, _DIRECTORY, nogil=False)
_INT, _S = types.int64, types.float64
_SIGNATURE: Final = (_INT, _INT, _S, _S, _S, _S, _INT, _INT, _INT, _INT)
