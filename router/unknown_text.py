"""Texts of contents that are not known, with which chat templates do what does not depend on what they say."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn

LEFT: Final = 1
RIGHT: Final = 2
_BOTH: Final = LEFT | RIGHT

_Content = tuple[int, int]  # the index of a message, and the sides without white space
_Piece = str | _Content


class ContentReadError(BaseException):
    """What is written depends on what a content says. Nothing in Jinja catches this."""


@dataclass(frozen=True, slots=True)
class Assumptions:
    """What has to be true of the messages' contents for the answers that were given about them."""

    # Of the content of which message what is not within it.
    absent: dict[tuple[int, str], None] = field(default_factory=dict)
    not_blank: dict[int, None] = field(default_factory=dict)  # more than white space


def _refuse(*_: Any) -> NoReturn:
    raise ContentReadError


class UnknownText:
    """Contents of messages, and known texts between them. Not a ``str``: no function takes it for one unnoticed.

    It does what text does without being looked at. Questions that have one answer for nearly all contents are given
    that one, and ``assumptions`` tells what it holds for. Everything else raises ContentReadError or TypeError.
    """

    __slots__ = ("_assumptions", "pieces")

    def __init__(self, pieces: Iterable[_Piece], assumptions: Assumptions) -> None:
        """Of these pieces one is a content at least."""
        joined: list[_Piece] = []
        for piece in pieces:
            if isinstance(piece, str) and joined and isinstance(joined[-1], str):
                joined[-1] += piece
            elif piece:
                joined.append(piece)
        self.pieces = tuple(joined)
        self._assumptions = assumptions

    @classmethod
    def of_message(cls, message: int, assumptions: Assumptions) -> UnknownText:
        return cls([(message, 0)], assumptions)

    def joined(self, parts: Iterable[str | UnknownText]) -> UnknownText:
        """These parts, of which one is not a ``str`` at least, one after the other. Raises TypeError for others."""
        pieces: list[_Piece] = []
        for part in parts:
            if isinstance(part, UnknownText):
                pieces += part.pieces
            elif isinstance(part, str):
                pieces.append(str(part))
            else:
                raise TypeError(f"not a text: {type(part).__name__}")
        return UnknownText(pieces, self._assumptions)

    def __add__(self, other: object) -> UnknownText:
        return self.joined((self, _known_or_unknown(other)))

    def __radd__(self, other: object) -> UnknownText:
        return self.joined((_known_or_unknown(other), self))

    def strip(self) -> UnknownText:
        return self._stripped(_BOTH)

    def lstrip(self) -> UnknownText:
        return self._stripped(LEFT)

    def rstrip(self) -> UnknownText:
        return self._stripped(RIGHT)

    def _stripped(self, sides: int) -> UnknownText:
        pieces = list(self.pieces)
        for side, end in ((LEFT, 0), (RIGHT, -1)):
            while sides & side and isinstance(blank := pieces[end], str) and blank.isspace():
                del pieces[end]
        for side, end in ((LEFT, 0), (RIGHT, -1)):
            if not sides & side:
                continue
            piece = pieces[end]
            if isinstance(piece, str):
                pieces[end] = piece.lstrip() if side == LEFT else piece.rstrip()
                continue
            message, without = piece
            if len(pieces) > 1:  # else white space would go from behind it, too
                self._assumptions.not_blank[message] = None
            pieces[end] = (message, without | side)
        return UnknownText(pieces, self._assumptions)

    def split(self, separator: object, maxsplit: object = -1) -> list[UnknownText]:
        if separator == "" or type(maxsplit) is not int or self._has(separator):
            _refuse()
        return [self]

    def startswith(self, start: object) -> bool:
        first = self.pieces[0]
        if isinstance(first, str):
            known = _known(start)
            if len(known) <= len(first) or not known.startswith(first):
                return first.startswith(known)
            _refuse()
        return self._has(start)

    def endswith(self, end: object) -> bool:
        last = self.pieces[-1]
        if isinstance(last, str):
            known = _known(end)
            if len(known) <= len(last) or not known.endswith(last):
                return last.endswith(known)
            _refuse()
        return self._has(end)

    def __contains__(self, within: object) -> bool:
        known = _known(within)
        return any(isinstance(piece, str) and known in piece for piece in self.pieces) or self._has(known)

    def _has(self, text: object) -> bool:
        """Whether it is within what is a content and nothing else: assumed not to be."""
        known = _known(text)
        if not known:
            return True
        if len(self.pieces) > 1:
            _refuse()
        (content,) = self.pieces
        assert isinstance(content, tuple)
        self._assumptions.absent[content[0], known] = None
        return False

    def __bool__(self) -> bool:
        contents = [piece for piece in self.pieces if isinstance(piece, tuple)]
        if len(contents) == len(self.pieces):  # else there is a known text, which is not empty
            self._assumptions.not_blank[contents[0][0]] = None
        return True

    def __eq__(self, other: object) -> bool:
        if other is None or isinstance(other, bool):
            return False
        if type(other) is str and not other:
            return not self
        _refuse()

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = _refuse
    __str__ = __repr__ = __format__ = _refuse
    __len__ = __iter__ = _refuse  # with ``__getitem__``, it would be a mapping for the operator of formats
    __lt__ = __le__ = __gt__ = __ge__ = _refuse


def _known(text: object) -> str:
    """Raises ContentReadError for what is not exactly a ``str``: marked-up text, say, does other things."""
    if type(text) is not str:
        _refuse()
    return text


def _known_or_unknown(text: object) -> str | UnknownText:
    return text if isinstance(text, UnknownText) else _known(text)
