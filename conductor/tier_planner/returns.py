"""When segments are used again, by what is learned of their blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from conductor.actions import Prefix
from conductor.reuse import ReuseModel
from conductor.tier_planner.prefix_tree import Segment

Floats = NDArray[np.float64]


class Returns:
    """A `ReuseModel` for each size of blocks. The middle block of a segment stands for all of it: the first and
    the last have fates of their own.
    """

    def __init__(self) -> None:
        self.seen = 0  # prompts
        self._models: dict[int, ReuseModel] = {}

    def observe(self, prefix: Prefix, now_s: float, route: str = "") -> None:
        """A prompt came, by a route: what is said of it is learned for the route."""
        self.seen += 1
        block_tokens = prefix.namespace.block_size
        model = self._models.get(block_tokens)
        if model is None:
            model = self._models[block_tokens] = ReuseModel(block_tokens)
        model.observe(prefix.hashes ^ prefix.namespace.domain_word, now_s, _kind(route))

    def probability(self, segment: Segment, within_s: float, now_s: float) -> float:
        """That a prompt has the segment again before ``now_s + within_s``."""
        return float(self.probabilities([segment], within_s, now_s)[0])

    def probabilities(self, segments: Sequence[Segment], within_s: float, now_s: float) -> Floats:
        """The same for several."""
        return self._ask(
            segments, lambda model, names: model.reuse_probabilities(names, now_s + within_s, now_s)
        )

    def rates(self, segments: Sequence[Segment], now_s: float) -> Floats:
        """Uses per second that keeping each brings, kept as long as is best; what ranks lowest goes first."""
        return self._ask(segments, lambda model, names: model.retention_values(names, now_s))

    def _ask(
        self, segments: Sequence[Segment], ask: Callable[[ReuseModel, NDArray[np.uint64]], Floats]
    ) -> Floats:
        names = np.array([segment.name for segment in segments], np.uint64)
        if len(self._models) == 1:
            (model,) = self._models.values()
            return ask(model, names)
        sizes = np.array([segment.prefix.namespace.block_size for segment in segments], np.int64)
        answers = np.zeros(len(segments))
        for size, model in self._models.items():
            answers[sizes == size] = ask(model, names[sizes == size])
        return answers


def _kind(route: str) -> int:
    """Its number in models, the same in every process."""
    return crc32(route.encode()) & 0x7FFFFFFF
