"""When segments are used again, by what is learned of their blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from cache_index import SnapshotError
from cache_index.array_file import ArrayFile, Arrays
from conductor.actions import Prefix
from conductor.reuse import ReuseModel
from conductor.tier_planner.prefix_tree import Segment

Floats = NDArray[np.float64]
# The version goes up when cells come to mean something else, too (`conductor.reuse.kernels.circumstances`).
_FILE: Final = ArrayFile("what was learned of reuse", b"KVREUSE\n", 1)


class Visit(NamedTuple):
    """A prompt came, by a route: what is said of it is learned for the route."""

    prefix: Prefix
    at_s: float
    route: str = ""


class Returns:
    """A `ReuseModel` for each size of blocks. The middle block of a segment stands for all of it: the first and
    the last have fates of their own.
    """

    def __init__(self) -> None:
        self.seen = 0  # prompts
        self._models: dict[int, ReuseModel] = {}

    @property
    def known_blocks(self) -> int:
        """Blocks whose last use is remembered."""
        return sum(model.known_blocks for model in self._models.values())

    def observe(self, visits: Sequence[Visit]) -> None:
        """Prompts came, in this order."""
        self.seen += len(visits)
        for block_tokens in dict.fromkeys(visit.prefix.namespace.block_size for visit in visits):
            model = self._models.get(block_tokens)
            if model is None:
                model = self._models[block_tokens] = ReuseModel(block_tokens)
            some = [visit for visit in visits if visit.prefix.namespace.block_size == block_tokens]
            blocks = np.array([len(visit.prefix.hashes) for visit in some])
            domains = np.array([visit.prefix.namespace.domain for visit in some], np.uint64)
            hashes = np.concatenate([visit.prefix.hashes for visit in some])
            hashes ^= np.repeat(domains, blocks)
            model.observe_all(
                hashes,
                blocks.cumsum(),
                np.array([visit.at_s for visit in some]),
                np.array([_kind(visit.route) for visit in some]),
            )

    def save(self, path: Path, now_s: float, wall_s: float) -> int:
        """Write all of it, atomically; the bytes written. ``now_s`` is the clock of requests, at ``wall_s``.

        OSError when the file cannot be written.
        """
        facts: list[dict[str, Any]] = []
        arrays: Arrays = {}
        for number, model in enumerate(self._models.values()):
            about, content = model.exported()
            facts.append(about)
            arrays |= {f"{number}.{name}": array for name, array in content.items()}
        header = {"seen": self.seen, "now_s": now_s, "wall_s": wall_s, "models": facts}
        return _FILE.write(path, header, arrays)

    @classmethod
    def load(cls, path: Path, now_s: float, wall_s: float) -> Returns:
        """What was saved, as old as it has become since. SnapshotError for any file that is not good."""
        header, arrays = _FILE.read(path)
        returns = cls()
        try:
            down_s = max(wall_s - header["wall_s"], 0.0)  # a clock that was set back tells nothing
            later_s = now_s - header["now_s"] - down_s
            returns.seen = int(header["seen"])
            for number, facts in enumerate(header["models"]):
                start = f"{number}."
                mine = {name[len(start) :]: each for name, each in arrays.items() if name.startswith(start)}
                returns._models[facts["block_tokens"]] = ReuseModel.restored(facts, mine, later_s)
        except (LookupError, ValueError, TypeError) as error:
            raise SnapshotError(f"{path}: the content does not fit together: {error}") from error
        return returns

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
