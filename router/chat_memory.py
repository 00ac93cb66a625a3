"""What was made of the messages of the latest chats, found again by the messages themselves."""

from __future__ import annotations

import threading
from collections import OrderedDict
from operator import is_
from typing import Any, Final, Generic, Protocol, TypeVar

FEWEST_MESSAGES: Final = 16  # of a chat that is worth it
_MESSAGE_BYTES: Final = 1_024  # kept alive with its text


class _Made(Protocol):
    @property
    def cost_bytes(self) -> int: ...


_T = TypeVar("_T", bound=_Made)
_Name = tuple[int, int, int]


class ChatMemory(Generic[_T]):
    """The least recently used chats make room when ``max_bytes`` are taken. Thread-safe.

    Messages are known where they are the same objects, which must not change: nothing of them is compared.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        # By a message in the latter half: chats that begin alike differ there, turns of one do not.
        self._kept: OrderedDict[_Name, tuple[list[Any], _T, int]] = OrderedDict()
        self.kept_bytes = 0
        self._lock = threading.Lock()

    def find(self, messages: list[Any], kind: int = 0) -> tuple[_T | None, int]:
        """What was made of messages that begin alike, and how many these are."""
        with self._lock:
            for name in _names(kind, messages):
                found = self._kept.get(name)
                if found is not None:
                    self._kept.move_to_end(name)
                    same = list(map(is_, messages, found[0]))
                    return found[1], same.index(False) if False in same else len(same)
        return None, 0

    def keep(self, messages: list[Any], made: _T, kind: int = 0) -> None:
        """``messages`` must not be changed either."""
        cost_bytes = made.cost_bytes + _MESSAGE_BYTES * len(messages)
        names = _names(kind, messages)
        if not names or cost_bytes > self._max_bytes:
            return
        with self._lock:
            self._forget(names[0])
            self._kept[names[0]] = (messages, made, cost_bytes)
            self.kept_bytes += cost_bytes
            while self.kept_bytes > self._max_bytes:
                self._forget(next(iter(self._kept)))

    def _forget(self, name: _Name) -> None:
        kept = self._kept.pop(name, None)
        if kept is not None:
            self.kept_bytes -= kept[2]


def _names(kind: int, messages: list[Any]) -> list[_Name]:
    """Of numbers of messages that are powers of two; the greatest is more than half of all."""
    places = range(FEWEST_MESSAGES.bit_length() - 1, len(messages).bit_length())
    return [(kind, 1 << place, id(messages[(1 << place) - 1])) for place in reversed(places)]
