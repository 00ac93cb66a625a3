"""What names a rank from one decision to the next, for policies that remember."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from conductor.cluster import RankState
from conductor.costs import Ints


class RosterRows:
    """Rows of the ranks in the cluster's tables, gathered once for every new roster.

    Positions among the candidates change with the roster, rows do not.
    """

    def __init__(self) -> None:
        self._ranks: Sequence[RankState] = ()
        self._rows: Ints = np.empty(0, np.int64)
        self._positions: Ints = np.empty(0, np.int64)

    def of(self, ranks: Sequence[RankState]) -> Ints:
        """The row of each rank."""
        if ranks is not self._ranks or len(ranks) != len(self._rows):
            self._ranks = ranks
            self._rows = np.array([rank.row for rank in ranks], np.int64)
            self._positions = np.full(int(self._rows.max(initial=-1)) + 1, -1, np.int64)
            self._positions[self._rows] = np.arange(len(ranks))
        return self._rows

    def position(self, ranks: Sequence[RankState], row: int) -> int | None:
        """Where among ``ranks`` the rank of that row is; None when it is not."""
        self.of(ranks)
        position = int(self._positions[row]) if row < len(self._positions) else -1
        return None if position < 0 else position
