"""A lock that is had in turn: whoever waits for it comes before whoever has just let it go."""

from __future__ import annotations

import threading


class TurnLock:
    """A context, for one thread at a time, which may enter it again.

    A thread that lets an ordinary lock go and takes it at once again, as one that serves hundreds of streams does,
    may have it before those are awake who wait for it, over and over: they wait for tenths of a second.
    """

    def __init__(self) -> None:
        self._next = threading.Lock()  # held by the one who has it next, until he has it
        self._lock = threading.Lock()
        self._owner = 0
        self._entered = 0

    def __enter__(self) -> None:
        me = threading.get_ident()
        if self._owner != me:
            with self._next:
                self._lock.acquire()
            self._owner = me
        self._entered += 1

    def __exit__(self, *_: object) -> None:
        self._entered -= 1
        if not self._entered:
            self._owner = 0
            self._lock.release()
