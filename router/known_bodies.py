"""Long chats' bodies, of which only what was not parsed before is parsed.

A chat's next turn repeats the bytes of the one before it up to the end of some message. JSON needs no more to know
how the rest goes on than where those messages stand: in place of them the rest is parsed behind a mark that
nobody else can write, and only where that mark turns up as the first message do the known ones take its place. So
neither escapes nor names that occur twice can make another document of it than the whole bytes are.
"""

from __future__ import annotations

import os
import re
import sys
from bisect import bisect_right
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import orjson

LONG_BYTES = 16_384  # of a body that is worth it
MAX_BYTES = 64 * 1024 * 1024
_NAME_BYTES = 64
_ENTRY_BYTES = 400  # of a dictionary's slot, a link of the order, and the heads of some objects
_MESSAGE_BYTES = 400  # of a parsed message, beside its text
_BETWEEN = re.compile(rb"[ \t\r\n]*,[ \t\r\n]*")


class _Chat(msgspec.Struct, gc=False):
    messages: list[msgspec.Raw]


_raw_messages = msgspec.json.Decoder(_Chat)


@dataclass(frozen=True, slots=True)
class _Known:
    """A body, where its messages begin and each of them ends, and they as parsed."""

    body: bytes
    start: int
    ends: list[int]
    messages: list[Any]

    @property
    def cost_bytes(self) -> int:
        return 2 * sys.getsizeof(self.body) + _MESSAGE_BYTES * len(self.ends) + _ENTRY_BYTES


class KnownBodies:
    """Reads JSON; the least recently used bodies make room when ``max_bytes`` are taken. Not thread-safe.

    Messages of different documents may be the same objects: they must not be changed.
    """

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._mark = os.urandom(16).hex()
        self._quoted_mark = b'"%b"' % self._mark.encode()
        # By some bytes in the latter half of each: chats that begin alike differ there, turns of one do not.
        self._kept: OrderedDict[bytes, _Known] = OrderedDict()
        self.kept_bytes = 0

    def read(self, body: bytes | bytearray) -> Any:
        """What ``orjson.loads`` gives. Raises orjson.JSONDecodeError."""
        if len(body) < LONG_BYTES:
            return orjson.loads(body)
        body = bytes(body)
        known, messages = self._find(body)
        if known is not None:
            document = self._read_behind(known, messages, body)
            if document is not None:
                return document
        document = orjson.loads(body)
        if isinstance(document, dict) and isinstance(document.get("messages"), list):
            self._keep(body, None, 0, body, document["messages"])
        return document

    def _find(self, body: bytes) -> tuple[_Known | None, int]:
        """A body that begins alike, and how many messages the two have in common."""
        size = _half_of(len(body))
        while size >= LONG_BYTES:
            known = self._kept.get(_name(body, size))
            if known is not None and (common := bisect_right(known.ends, _same_bytes(body, known.body))):
                self._kept.move_to_end(_name(body, size))
                return known, common
            size //= 2
        return None, 0

    def _read_behind(self, known: _Known, common: int, body: bytes) -> Any:
        """None where the body is no JSON, or its messages are not the known ones and others."""
        rest = b"%b%b%b" % (body[: known.start], self._quoted_mark, body[known.ends[common - 1] :])
        try:
            document = orjson.loads(rest)
        except orjson.JSONDecodeError:
            return None  # the error's position is that in the whole body
        messages = document.get("messages") if isinstance(document, dict) else None
        if not isinstance(messages, list) or not messages or messages[0] != self._mark:
            return None
        messages[:1] = known.messages[:common]
        self._keep(body, known, common, rest, messages)
        return document

    def _keep(self, body: bytes, known: _Known | None, common: int, rest: bytes, messages: list[Any]) -> None:
        """``rest`` is the body with a mark in place of its messages in ``common`` with the known one."""
        try:
            raws = [bytes(raw) for raw in _raw_messages.decode(rest).messages]
        except msgspec.MsgspecError:
            return
        if known is None:
            if not raws:
                return
            start = body.find(raws[0][:_NAME_BYTES])  # elsewhere than in the messages, no mark will turn up
            if not body.startswith(raws[0], start):
                return
            ends = [start + len(raws[0])]
        else:
            start, ends = known.start, known.ends[:common]
        for raw in raws[1:]:
            between = _BETWEEN.match(body, ends[-1])
            if between is None or not body.startswith(raw, between.end()):
                return
            ends.append(between.end() + len(raw))
        if len(ends) != len(messages):
            return
        kept = _Known(body, start, ends, list(messages))
        size = _half_of(ends[-1])
        if size < LONG_BYTES or kept.cost_bytes > self._max_bytes:
            return
        name = _name(body, size)
        self._forget(name)
        self._kept[name] = kept
        self.kept_bytes += kept.cost_bytes
        while self.kept_bytes > self._max_bytes:
            self._forget(next(iter(self._kept)))

    def _forget(self, name: bytes) -> None:
        known = self._kept.pop(name, None)
        if known is not None:
            self.kept_bytes -= known.cost_bytes


def _half_of(size: int) -> int:
    """The greatest power of two that is not above it."""
    return 1 << (size.bit_length() - 1)


def _name(body: bytes, size: int) -> bytes:
    """Bytes behind which a body has at most as many again."""
    return b"%d %b" % (size, body[size - _NAME_BYTES : size])


def _same_bytes(one: bytes, other: bytes) -> int:
    """How many bytes the two begin with alike."""
    size = min(len(one), len(other))
    unlike = np.frombuffer(one, np.uint8, size) != np.frombuffer(other, np.uint8, size)
    place = int(unlike.argmax())
    return place if unlike[place] else size
