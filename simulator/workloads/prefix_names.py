"""Block hash ids for contexts that are described by what they contain.

A context is a sequence of pieces: a system prompt, a document, an answer. Blocks are cut across pieces as an engine
cuts them, and a block's id stands for everything up to its end, so that equal beginnings get equal ids however the
pieces are aligned, and nothing else does.
"""

from __future__ import annotations

from collections.abc import Hashable
from itertools import count

_Piece = tuple[Hashable, int, int]  # content, first token, tokens


class PrefixNames:
    """Numbers prefixes from 0 in order of appearance."""

    def __init__(self, block_tokens: int) -> None:
        if block_tokens < 1:
            raise ValueError(f"block_tokens must be at least 1, not {block_tokens}")
        self.block_tokens = block_tokens
        self._ids: dict[tuple[int, tuple[_Piece, ...]], int] = {}
        self._next = count()

    def name(self, parent: int, pieces: tuple[_Piece, ...]) -> int:
        """The id of the block with these ``pieces`` behind the block ``parent`` (-1: behind nothing)."""
        key = (parent, pieces)
        found = self._ids.get(key)
        if found is None:
            found = self._ids[key] = next(self._next)
        return found

    def unshared(self, blocks: int) -> tuple[int, ...]:
        """Ids that nothing else has."""
        return tuple(next(self._next) for _ in range(blocks))


class Context:
    """A prompt that grows; appending costs what is appended."""

    def __init__(self, names: PrefixNames) -> None:
        self._names = names
        self._full: list[int] = []
        self._open: list[_Piece] = []
        self._open_tokens = 0

    @property
    def tokens(self) -> int:
        return len(self._full) * self._names.block_tokens + self._open_tokens

    def append(self, content: Hashable, tokens: int) -> None:
        """Add all ``tokens`` tokens of ``content``; equal contents are equal tokens."""
        block_tokens, first = self._names.block_tokens, 0
        while first < tokens:
            taken = min(tokens - first, block_tokens - self._open_tokens)
            self._open.append((content, first, taken))
            self._open_tokens += taken
            first += taken
            if self._open_tokens == block_tokens:
                self._full.append(self._last_block())
                self._open, self._open_tokens = [], 0

    def hash_ids(self) -> tuple[int, ...]:
        """One id per block, the last one for a block that is perhaps not full."""
        return (*self._full, self._last_block()) if self._open else tuple(self._full)

    def _last_block(self) -> int:
        return self._names.name(self._full[-1] if self._full else -1, tuple(self._open))
