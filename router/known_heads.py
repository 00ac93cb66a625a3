"""Heads of requests that were read before: clients send the same one every time, but for the body's length.

What was worked out for a head holds for all that differ from it in the digits of their content-length alone. It was
the ordinary parser that read the first of them, so nothing is taken for a request here that it would refuse.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from typing import TYPE_CHECKING, Final, NamedTuple

from router.framing import MAX_LENGTH_DIGITS
from router.heads import Headers
from router.request_head import RequestHead

if TYPE_CHECKING:
    from router.exchange import Exchange

MAX_HEADS: Final = 256
MAX_HEAD_BYTES: Final = 4_096
_MAX_SEEN: Final = 1_024
_LENGTH = re.compile(rb"\r\nContent-Length: ?([0-9]{1,%d})\r\n" % MAX_LENGTH_DIGITS, re.IGNORECASE)


class CutHead(NamedTuple):
    """A head's bytes around the digits of its content-length, the blank line included."""

    before: bytes
    digits: bytes
    behind: bytes

    def agrees(self, headers: Headers) -> bool:
        """Whether a parser found these header lines, one content-length among them, and no other end than here."""
        lengths = [value for name, value in headers if name == b"content-length"]
        if lengths != [self.digits] or any(name == b"transfer-encoding" for name, _ in headers):
            return False
        line_ends = self.before.count(b"\r\n") + self.behind.count(b"\r\n")
        returns = self.before.count(b"\r") + self.behind.count(b"\r")
        feeds = self.before.count(b"\n") + self.behind.count(b"\n")
        return returns == feeds == line_ends == len(headers) + 2


class KnownHead:
    """``kind`` says by whom such requests are answered."""

    __slots__ = ("_at", "_before", "_behind", "_behind_bytes", "_digits_end", "head", "kind")

    def __init__(self, cut: CutHead, head: RequestHead, kind: type[Exchange]) -> None:
        self.head = head
        self.kind = kind
        self._before = cut.before
        self._at = len(cut.before)
        self._digits_end = self._at + MAX_LENGTH_DIGITS + 1  # and the return behind them
        self._behind = cut.behind
        self._behind_bytes = len(cut.behind)

    def begins(self, data: bytes) -> tuple[int, int] | None:
        """Where the body begins and ends, if these bytes begin with such a head."""
        if data.startswith(self._before):
            end = data.find(b"\r", self._at, self._digits_end)
            digits = data[self._at : end]
            if digits.isdigit() and data.startswith(self._behind, end):
                start = end + self._behind_bytes
                return start, start + int(digits)
        return None


class KnownHeads:
    """The least recently used make room. A head is kept when it comes a second time: many never do."""

    def __init__(self, most: int = MAX_HEADS) -> None:
        self._most = most
        self._known: OrderedDict[bytes, KnownHead] = OrderedDict()
        self._seen: set[int] = set()

    def __len__(self) -> int:
        return len(self._known)

    def look_up(self, data: bytes) -> KnownHead | CutHead | None:
        """The head that these bytes begin with; cut, where it came before and is not known yet.

        None where it came for the first time, or is not complete or not of a kind that can be known.
        """
        end = data.find(b"\r\n\r\n", 0, MAX_HEAD_BYTES)
        if end < 0:
            return None
        found = _LENGTH.search(data, 0, end + 2)
        if found is None:
            return None
        cut = CutHead(data[: found.start(1)], found[1], data[found.end(1) : end + 4])
        name = cut.before + cut.behind
        known = self._known.get(name)
        if known is not None:
            self._known.move_to_end(name)
            return known
        seen = hash(name)
        if seen in self._seen:
            return cut
        if len(self._seen) >= _MAX_SEEN:
            self._seen.clear()
        self._seen.add(seen)
        return None

    def keep(self, cut: CutHead, head: RequestHead, kind: type[Exchange]) -> None:
        """Where a parser has read it as the head of one request, whose body is as long as it says."""
        name = cut.before + cut.behind
        self._seen.discard(hash(name))
        self._known[name] = KnownHead(cut, head, kind)
        if len(self._known) > self._most:
            self._known.popitem(last=False)
