"""Long chats whose tokens are known as a whole: a new turn is not put together from all the earlier ones."""

from __future__ import annotations

import sys
from collections import OrderedDict
from dataclasses import dataclass
from itertools import accumulate

_ENTRY_BYTES = 400  # of a dictionary's slot, a link of the order, and the heads of six objects
_END_BYTES = 2 * 40  # of a segment's two ends
_FEWEST_SEGMENTS = 8  # of a text that is kept: fewer are sooner looked up


@dataclass(frozen=True, slots=True)
class Beginning:
    """Leading segments of a text, and their tokens: where each ends, in characters and in bytes of tokens."""

    text: str
    tokens: bytes | bytearray
    text_ends: list[int]
    token_ends: list[int]

    @property
    def characters(self) -> int:
        return self.text_ends[-1]

    @property
    def token_bytes(self) -> memoryview:
        return memoryview(self.tokens)[: self.token_ends[-1]]

    @property
    def cost_bytes(self) -> int:
        return sys.getsizeof(self.text) + len(self.tokens) + _END_BYTES * len(self.text_ends) + _ENTRY_BYTES


class KnownBeginnings:
    """The latest text of each chat, named by its first two segments; the least recently used make room.

    ``separator`` begins every segment but the first one of a text that begins otherwise. Not thread-safe.
    """

    def __init__(self, separator: str, max_bytes: int) -> None:
        self._separator = separator
        self._max_bytes = max_bytes
        self._kept: OrderedDict[str, Beginning] = OrderedDict()
        self.kept_bytes = 0

    def name_of(self, text: str) -> str | None:
        """None where the first two segments are most of the text, or all."""
        half = len(text) // 2
        first = text.find(self._separator, 1, half)
        second = text.find(self._separator, first + 1, half) if first > 0 else -1
        return text[:second] if second > 0 else None

    def find(self, name: str, text: str) -> Beginning | None:
        """The longest beginning that the chat's latest text has in common with this one, up to a segment's end."""
        kept = self._kept.get(name)
        if kept is None:
            return None
        self._kept.move_to_end(name)
        ends = kept.text_ends
        # The last segment of a text grows with the next turn, so all but that one are most often the same.
        segments = len(ends) - 1
        if not text.startswith(kept.text[: ends[segments - 1]]):
            segments = _common(text, kept.text, ends)
        while segments and not text.startswith(self._separator, ends[segments - 1]):
            segments -= 1  # it goes on differently
        if not segments:
            return None
        return Beginning(kept.text, kept.tokens, ends[:segments], kept.token_ends[:segments])

    def keep(
        self,
        name: str,
        text: str,
        tokens: bytes | bytearray,
        beginning: Beginning | None,
        segments: list[str],
        found: list[bytes],
    ) -> None:
        """``tokens`` are those of the text, which is the ``beginning`` and the segments with the tokens found."""
        if beginning is None:
            text_ends, token_ends = list(accumulate(map(len, segments))), list(accumulate(map(len, found)))
        else:
            text_ends = list(accumulate(map(len, segments), initial=beginning.text_ends[-1]))
            token_ends = list(accumulate(map(len, found), initial=beginning.token_ends[-1]))
            text_ends[:1], token_ends[:1] = beginning.text_ends, beginning.token_ends
        kept = Beginning(text, tokens, text_ends, token_ends)
        cost_bytes = sys.getsizeof(name) + kept.cost_bytes
        if len(text_ends) < _FEWEST_SEGMENTS or cost_bytes > self._max_bytes:
            return
        self._forget(name)
        self._kept[name] = kept
        self.kept_bytes += cost_bytes
        while self.kept_bytes > self._max_bytes:
            self._forget(next(iter(self._kept)))

    def _forget(self, name: str) -> None:
        kept = self._kept.pop(name, None)
        if kept is not None:
            self.kept_bytes -= sys.getsizeof(name) + kept.cost_bytes


def _common(text: str, kept: str, ends: list[int]) -> int:
    """How many segments of ``kept`` the text begins with: looks at what is not decided in halves."""
    same, possible = 0, len(ends) - 1
    while same < possible:
        middle = (same + possible + 1) // 2
        start = ends[same - 1] if same else 0
        if text.startswith(kept[start : ends[middle - 1]], start):
            same = middle
        else:
            possible = middle - 1
    return same
