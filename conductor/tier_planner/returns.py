"""When segments are used again, by what is learned of their blocks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from conductor.actions import Prefix
from conductor.reuse import ReuseModel
from conductor.tier_planner.prefix_tree import Segment


class Returns:
    """`ReuseModel` by segments. The middle block stands for all: the first and the last have fates of their own."""

    def __init__(self, model: ReuseModel) -> None:
        self._model = model

    def observe(self, prefix: Prefix, now_s: float) -> None:
        """A prompt came."""
        self._model.observe(prefix.hashes ^ prefix.namespace.domain_word, now_s)

    def probability(self, segment: Segment, within_s: float, now_s: float) -> float:
        """That a prompt has the segment again before ``now_s + within_s``."""
        return float(self._model.reuse_probabilities(_names([segment]), now_s + within_s, now_s)[0])

    def rates(self, segments: Sequence[Segment], now_s: float) -> NDArray[np.float64]:
        """Uses per second that keeping each brings, kept as long as is best; what ranks lowest goes first."""
        return self._model.retention_values(_names(segments), now_s)


def _names(segments: Sequence[Segment]) -> NDArray[np.uint64]:
    return np.array(
        [
            s.prefix.hashes.item((s.start + s.stop) // 2) ^ s.prefix.namespace.domain
            for s in segments
        ],
        np.uint64,
    )  # fmt: skip
