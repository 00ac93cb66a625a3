"""What a template writes around the contents of chats of one shape, as the kernels read it."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate, count

import numpy as np
from numpy.typing import NDArray

from router.plain_chats import writing as w
from router.template_shapes import Shape

_LAST_MESSAGES = 4
_MOST_SHARED = 16
_LAYOUT_BYTES = 2_048  # of its arrays' heads and its different texts
_PIECE_BYTES = 5 * 8 + 1 + 3 * 8 + 64  # of arrays, of references, and of a condition


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """``cuts`` [i] is where in literal i the first separator begins, in bytes, -1 where there is none: what stands
    in front of a separator has the same tokens whatever follows. ``cut_characters`` is the same in characters.
    ``words`` are all of it as `writing` reads it.

    ``in_turn``: the contents are written in the order of the messages, each once. ``unwritten`` must not be blank,
    though nobody writes them.
    """

    shape: Shape
    literals: NDArray[np.uint8]
    literal_ends: NDArray[np.int64]
    contents: NDArray[np.int64]
    how: NDArray[np.int64]
    cuts: NDArray[np.int64]
    cut_characters: NDArray[np.int64]
    in_turn: bool
    is_ascii: bool
    unwritten: tuple[int, ...]
    roles: NDArray[np.uint8]
    words: NDArray[np.int64] = field(default_factory=lambda: np.zeros(w.LAYOUT, np.int64))
    address: int = field(init=False)  # of the words
    number: int = field(default_factory=count().__next__)  # names it, and keeps nothing alive
    _shared: dict[tuple[int, int], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        words = self.words
        object.__setattr__(self, "address", int(words.ctypes.data))
        words[w.MESSAGES], words[w.CONTENTS] = self.roles.size, self.contents.size
        words[w.LITERAL_BYTES] = self.literals.size
        words[w.IN_TURN], words[w.IS_ASCII] = self.in_turn, self.is_ascii
        for word, array in (
            (w.ROLES_AT, self.roles),
            (w.CONTENTS_AT, self.contents),
            (w.HOW_AT, self.how),
            (w.LITERALS_AT, self.literals),
            (w.LITERAL_ENDS_AT, self.literal_ends),
            (w.CUTS_AT, self.cuts),
        ):
            words[word] = array.ctypes.data

    @property
    def holds_always(self) -> bool:
        """Whatever the contents are."""
        return not (self.shape.absent or self.unwritten)

    @property
    def cost_bytes(self) -> int:
        """Of a piece of text there are the bytes, and references to one that is shared."""
        return _LAYOUT_BYTES + self.literals.nbytes + _PIECE_BYTES * self.literal_ends.size

    def shared_with(self, other: Layout, messages: int) -> int:
        """Of how many of so many messages both write the same, up to the separator behind them, if they may at all.

        Templates may write of the last turns what they do not write of earlier ones; further back nothing is tried.
        """
        if self is other:
            return messages
        key = (other.number, messages)
        shared = self._shared.get(key)
        if shared is None:
            if len(self._shared) >= _MOST_SHARED:
                self._shared.clear()
            fewest = max(messages - _LAST_MESSAGES, 0)
            tried = range(messages, fewest, -1)
            shared = self._shared[key] = next((each for each in tried if self._begins_as(other, each)), 0)
        return shared

    def _begins_as(self, other: Layout, messages: int) -> bool:
        mine, theirs = self.shape, other.shape
        cut = self.cuts.item(messages)
        return (
            cut >= 0
            and cut == other.cuts.item(messages)
            and mine.literals[:messages] == theirs.literals[:messages]
            and mine.literals[messages].encode()[:cut] == theirs.literals[messages].encode()[:cut]
            and mine.stripped[:messages] == theirs.stripped[:messages]
            and _of_first(messages, mine.absent) <= set(theirs.absent)
            and {each for each in mine.not_blank if each < messages} <= set(theirs.not_blank)
        )


def _of_first(messages: int, absent: tuple[tuple[int, str], ...]) -> set[tuple[int, str]]:
    return {each for each in absent if each[0] < messages}


def layout_of(roles: bytes, shape: Shape, separators: frozenset[str]) -> Layout:
    """Of chats whose messages have these roles, by their numbers."""
    literals = [literal.encode() for literal in shape.literals]
    places = [_first_of(separators, literal) for literal in shape.literals]
    not_blank = frozenset(shape.not_blank)
    return Layout(
        shape=shape,
        literals=np.frombuffer(b"".join(literals), np.uint8),
        literal_ends=np.array(list(accumulate(map(len, literals))), np.int64),
        contents=np.array(shape.contents, np.int64),
        how=np.array(
            [
                sides | (w.NOT_BLANK if message in not_blank else 0)
                for message, sides in zip(shape.contents, shape.stripped, strict=True)
            ],
            np.int64,
        ),
        cuts=np.array(
            [
                w.NO_CUT if place < 0 else len(literal[:place].encode())
                for place, literal in zip(places, shape.literals, strict=True)
            ],
            np.int64,
        ),
        cut_characters=np.array(places, np.int64),
        in_turn=shape.contents == tuple(range(len(shape.contents))),
        is_ascii=all(map(str.isascii, shape.literals)),
        unwritten=tuple(not_blank - set(shape.contents)),
        roles=np.frombuffer(roles, np.uint8),
    )


def _first_of(separators: frozenset[str], literal: str) -> int:
    return min((place for each in separators if (place := literal.find(each)) >= 0), default=w.NO_CUT)
