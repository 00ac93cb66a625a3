"""What a poll sees of the engines, look by look: the timeline of a simulation, and how evenly load was spread."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from simulator.cluster.kernels.arrays import Floats, Ints
from simulator.cluster.results import Timeline


class Looks:
    """Gauges as `Engines.read_gauges` reads them, one look after the other."""

    def __init__(self, instances: tuple[str, ...]) -> None:
        self._instances = instances
        self._at_s: list[float] = []
        self._gauges: list[Floats] = []

    def add(self, at_s: float, gauges: Floats) -> None:
        self._at_s.append(at_s)
        self._gauges.append(gauges)

    def timeline(self, kv_tokens: Ints) -> Timeline:
        """``kv_tokens`` are those of each instance's device."""
        running, waiting, used_tokens = np.moveaxis(self._table(), 2, 0)
        return Timeline(
            at_s=np.array(self._at_s),
            instances=self._instances,
            running=running.astype(np.int32),
            waiting=waiting.astype(np.int32),
            kv_usage=(used_tokens / kv_tokens).astype(np.float32),
        )

    def load_variation(self, groups: Sequence[Sequence[int]]) -> float:
        """Of requests per instance of a group: standard deviation by mean, its mean over looks and groups."""
        requests = self._table()[:, :, :2].sum(axis=2)
        variations = np.zeros((len(requests), len(groups)))
        busy = np.zeros(variations.shape, np.bool_)
        for number, group in enumerate(groups):
            loads = np.ascontiguousarray(requests[:, group])
            means = loads.mean(axis=1)
            busy[:, number] = means > 0
            variations[:, number] = loads.std(axis=1) / np.where(means > 0, means, 1.0)
        return float(variations[busy].mean()) if busy.any() else 0.0

    def _table(self) -> Floats:
        return np.array(self._gauges).reshape(-1, len(self._instances), 3)
