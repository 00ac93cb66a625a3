"""Token ids of text that was tokenized before, so that a long conversation costs what its new turn does."""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import compress
from typing import cast

import numpy as np

from conductor.placement import Tokens
from router.known_beginnings import KnownBeginnings
from router.segments import Segmentation

LONG_CHARACTERS = 16_384  # of a text whose beginning is looked for as a whole
_ENTRY_BYTES = 200  # of a dictionary's slot, a link of the order, and the heads of two objects


@dataclass(frozen=True, slots=True)
class TokenCacheState:
    """Characters of prompts since the start, by whether their tokens were known.

    ``off`` says why nothing is kept; then the other figures are 0.
    """

    off: str | None = None
    kept_bytes: int = 0
    known_characters: int = 0
    new_characters: int = 0


class TokenCache:
    """The least recently used segments make room when ``max_bytes`` are taken. Thread-safe.

    ``encode`` gives the tokens of a text without adding any, or None where that takes more than is allowed for
    so many new characters. Every segment is kept under its whole text: its tokens are what ``encode`` would give.
    Texts with the separator of ``by_separator`` are split there alone; of long ones a quarter of the memory keeps
    what they had in common with a later turn.
    """

    def __init__(
        self,
        segmentation: Segmentation,
        encode: Callable[[str, int | None], Tokens | None],
        max_bytes: int,
        by_separator: Segmentation | None = None,
    ) -> None:
        self._segmentation = segmentation
        self._by_separator = by_separator
        self._encode = encode
        self._beginnings: KnownBeginnings | None = None
        if by_separator is not None and by_separator.separator is not None:
            self._beginnings = KnownBeginnings(by_separator.separator, max_bytes // 4)
            max_bytes -= max_bytes // 4
        self._max_bytes = max_bytes
        self._kept: OrderedDict[str, bytes] = OrderedDict()
        self._kept_bytes = 0
        self._known_characters = 0
        self._new_characters = 0
        self._lock = threading.Lock()

    def tokens(self, text: str, *, most_new: int | None = None) -> Tokens | None:
        """The text's token ids; None when more than ``most_new`` of its characters would be tokenized."""
        segmentation = self._segmentation_of(text)
        beginnings, beginning, name = self._beginnings, None, None
        if beginnings is not None and segmentation is self._by_separator and len(text) >= LONG_CHARACTERS:
            name = beginnings.name_of(text)
            if name is not None:
                with self._lock:
                    beginning = beginnings.find(name, text)
        segments = segmentation.split(text if beginning is None else text[beginning.characters :])
        found = self._look_up(segments)
        new = 0
        if not all(found):
            missing = [place for place, known in enumerate(found) if known is None]
            new = sum([len(segments[place]) for place in missing])
            if most_new is not None and new > most_new:
                return None
            if missing and not self._fill_in(segmentation, segments, found, missing, most_new):
                return None
        parts = cast("list[bytes]", found)
        tokens = bytearray().join(parts if beginning is None else (beginning.token_bytes, *parts))
        with self._lock:
            self._new_characters += new
            self._known_characters += len(text) - new
            if beginnings is not None and name is not None:
                beginnings.keep(name, text, tokens, beginning, segments, parts)
        return np.frombuffer(tokens, np.uint32)

    def _segmentation_of(self, text: str) -> Segmentation:
        by_separator = self._by_separator
        if by_separator is not None and str(by_separator.separator) in text:
            return by_separator
        return self._segmentation

    def state(self) -> TokenCacheState:
        kept_bytes = self._kept_bytes + (0 if self._beginnings is None else self._beginnings.kept_bytes)
        return TokenCacheState(None, kept_bytes, self._known_characters, self._new_characters)

    def _look_up(self, segments: list[str]) -> list[bytes | None]:
        kept = self._kept
        with self._lock:
            found = list(map(kept.get, segments))
            deque(map(kept.move_to_end, compress(segments, found)), maxlen=0)  # which were used last
        return found

    def _fill_in(
        self,
        segmentation: Segmentation,
        segments: list[str],
        found: list[bytes | None],
        missing: list[int],
        most_new: int | None,
    ) -> bool:
        """Tokenize what is missing, each run of it in one go, and keep it; False where that takes too much."""
        all_between = range(missing[0], missing[-1] + 1)
        if len(missing) < len(all_between):
            new = sum([len(segments[place]) for place in missing])
            if 2 * new > sum(map(len, segments[missing[0] : missing[-1] + 1])):
                missing = list(all_between)  # sooner done than several pieces of it
        first = 0
        for behind in range(1, len(missing) + 1):
            if behind < len(missing) and missing[behind] == missing[behind - 1] + 1:
                continue
            run = slice(missing[first], missing[behind - 1] + 1)
            texts = segments[run]
            tokens = self._encode("".join(texts), most_new)
            kept = None if tokens is None else self._keep_run(segmentation, texts, tokens, most_new)
            if kept is None:
                return False
            found[run] = kept
            first = behind
        return True

    def _keep_run(
        self, segmentation: Segmentation, segments: list[str], tokens: Tokens, most_new: int | None
    ) -> list[bytes] | None:
        """The tokens of each of the segments, which are now kept, from those of the text that they make up.

        None where that takes too much.
        """
        parts = [tokens] if len(segments) == 1 else segmentation.split_tokens(tokens, segments)
        if parts is None:
            parts = []
            for segment in segments:
                part = self._encode(segment, most_new)
                if part is None:
                    return None
                parts.append(part)
        kept = [part.tobytes() for part in parts]
        with self._lock:
            for segment, ids in zip(segments, kept, strict=True):
                self._keep(segment, ids)
        return kept

    def _keep(self, segment: str, tokens: bytes) -> None:
        cost_bytes = _cost_bytes(segment, tokens)
        if segment in self._kept or cost_bytes > self._max_bytes:
            return
        self._kept[segment] = tokens
        self._kept_bytes += cost_bytes
        while self._kept_bytes > self._max_bytes:
            self._kept_bytes -= _cost_bytes(*self._kept.popitem(last=False))


def _cost_bytes(segment: str, tokens: bytes) -> int:
    return sys.getsizeof(segment) + len(tokens) + _ENTRY_BYTES
