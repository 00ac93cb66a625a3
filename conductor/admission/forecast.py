"""What the decode ranks will be carrying: every placement under way, and when its decode begins and ends.

Flat arrays with one slot a placement, and one compiled pass over them for every question.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from conductor.admission.forecast_kernel import carried
from conductor.costs import Floats

_FIRST_SLOTS = 64
_NEVER_S = np.inf


class DecodeLoad(NamedTuple):
    """What every row of the load table carries at one moment; both arrays have one entry a row."""

    sequences: Floats
    context_tokens: Floats


class DecodeForecast:
    """The decodes that were placed and have not ended, each on one row of the load table.

    Ids that are not known (any more) are ignored: a placement may end twice, or before it started.
    """

    def __init__(self) -> None:
        self._slots: dict[str, int] = {}
        self._free: list[int] = []
        self._used = 0  # slots from here on were never taken
        self._rows = 0
        self._row = np.zeros(_FIRST_SLOTS, np.int64)
        self._start_s = np.full(_FIRST_SLOTS, _NEVER_S)
        self._lasts_s = np.zeros(_FIRST_SLOTS)
        self._started = np.zeros(_FIRST_SLOTS, np.bool_)
        self._context_tokens = np.zeros(_FIRST_SLOTS)  # when the decode begins
        self._tokens_per_s = np.zeros(_FIRST_SLOTS)

    def __len__(self) -> int:
        """Placements under way."""
        return len(self._slots)

    def placed(
        self,
        placement_id: str,
        row: int,
        *,
        start_s: float,
        end_s: float,
        context_tokens: int,
        output_tokens: float,
    ) -> None:
        """A placement was made whose decode should run on ``row`` from ``start_s`` to ``end_s``.

        ``context_tokens`` are in the KV cache when it begins, ``output_tokens`` more when it ends. An id that is
        placed again replaces what was known of it. Raises ValueError for a negative row.
        """
        if row < 0:
            raise ValueError(f"placement {placement_id!r}: row {row} is none of the load table")
        slot = self._slots.get(placement_id)
        if slot is None:
            slot = self._slots[placement_id] = self._take_slot()
        lasts_s = max(end_s - start_s, 0.0)
        self._row[slot] = row
        self._start_s[slot] = start_s
        self._lasts_s[slot] = lasts_s
        self._started[slot] = False
        self._context_tokens[slot] = context_tokens
        self._tokens_per_s[slot] = output_tokens / lasts_s if lasts_s > 0 else 0.0
        self._rows = max(self._rows, row + 1)

    def started(self, placement_id: str, now_s: float) -> None:
        """Its decode began; it is expected to last as long as was predicted."""
        slot = self._slots.get(placement_id)
        if slot is not None and not self._started[slot]:
            self._start_s[slot] = now_s
            self._started[slot] = True

    def ended(self, placement_id: str) -> None:
        """It finished, failed or was cancelled, in whatever stage."""
        slot = self._slots.pop(placement_id, None)
        if slot is not None:
            self._start_s[slot] = _NEVER_S
            self._started[slot] = False
            self._free.append(slot)

    def at(self, t_s: float, now_s: float | None = None, *, rows: int = 0) -> DecodeLoad:
        """What every row should carry at ``t_s``, as arrays of at least ``rows`` entries.

        With ``now_s``, what should have happened by then and was not reported is put right: a decode that has
        not started cannot start before now, and one that is overdue lasts as long again as it is overdue (the
        longer an answer has become, the more of it is to be expected).
        """
        return self._carried(t_s, -np.inf if now_s is None else now_s, -1.0, rows)

    def at_uniform(self, t_s: float, decode_s: float, now_s: float, *, rows: int = 0) -> DecodeLoad:
        """Like `at`, with every decode taken to last ``decode_s``, ended or not.

        What Mooncake's system-level prediction assumes (arXiv 2407.00079v3, section 7).
        """
        return self._carried(t_s, now_s, max(decode_s, 0.0), rows)

    def _carried(self, t_s: float, now_s: float, uniform_s: float, rows: int) -> DecodeLoad:
        size = max(self._rows, rows)
        load = DecodeLoad(np.zeros(size), np.zeros(size))
        carried(
            self._used,
            self._row,
            self._start_s,
            self._lasts_s,
            self._started,
            self._context_tokens,
            self._tokens_per_s,
            t_s,
            now_s,
            uniform_s,
            load.sequences,
            load.context_tokens,
        )
        return load

    def _take_slot(self) -> int:
        if self._free:
            return self._free.pop()
        if self._used == len(self._row):
            for name in ("_row", "_start_s", "_lasts_s", "_started", "_context_tokens", "_tokens_per_s"):
                column = getattr(self, name)
                setattr(self, name, np.concatenate([column, np.zeros_like(column)]))
        self._used += 1
        return self._used - 1
