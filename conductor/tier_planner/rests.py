"""What is left alone for a while: nothing goes to and fro."""

from __future__ import annotations

from itertools import takewhile

from conductor.actions import Place


class Rests:
    """Until when what was moved stays where it is, and what was dropped stays away: ``rest_s`` from its order on.

    Prefixes are named by the hashes of their last blocks. There are many: what is by place is nothing that the
    garbage collector looks through.
    """

    def __init__(self, rest_s: float) -> None:
        self._rest_s = rest_s
        self._until_s: dict[Place, dict[int, float]] = {}  # the earliest first

    def begin(self, block_hash: int, place: Place, now_s: float) -> None:
        there = self._until_s.setdefault(place, {})
        there.pop(block_hash, None)  # it goes to the end
        there[block_hash] = now_s + self._rest_s

    def end(self, block_hash: int, place: Place) -> None:
        self._until_s.get(place, {}).pop(block_hash, None)

    def resting(self, block_hash: int, place: Place) -> bool:
        """As of the latest `expire`."""
        return block_hash in self._until_s.get(place, ())

    def expire(self, now_s: float) -> None:
        for there in self._until_s.values():
            over = takewhile(lambda each: each[1] <= now_s, there.items())
            for block_hash, _ in list(over):
                del there[block_hash]
