"""Bodies of long chats whose tokens are known: a chat's next turn repeats its bytes up to the end of a message."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from numpy.typing import NDArray

from conductor.placement import Hashes, Tokens
from router.plain_chats import kernels
from router.plain_chats.writing import ENDS, NO_CUT, TOKEN_CUTS

if TYPE_CHECKING:
    from router.inference import Body
    from router.plain_chats.layout import Layout
    from router.plain_chats.prompts import PlainPrompts

LONG_BYTES = 2_048  # of a body that is worth it
_NAME_BYTES = 64
_HASH_BYTES = 8
_ENTRY_BYTES = 1_200  # of a dictionary's slot, a link of the order, and the heads of some objects


class KnownChat(msgspec.Struct, frozen=True, gc=False):
    """A body, its tokens, and the ``marks`` of its messages: see `writing`.

    ``facts`` are what the body says in front of its messages: see `scanning`. ``hashes`` are the sequence hashes of
    the tokens' full blocks, by block size, as far as placing the chat came to work them out.
    """

    body: Body
    data: NDArray[np.uint8]
    prompts: PlainPrompts
    layout: Layout
    facts: NDArray[np.int64]
    roles: bytes
    marks: NDArray[np.int64]
    tokens: Tokens
    hashes: dict[int, Hashes]

    def hashes_of_first(self, tokens: int) -> dict[int, Hashes]:
        """Of the full blocks of so many."""
        return {size: hashes[: tokens // size] for size, hashes in tuple(self.hashes.items())}

    def cost_bytes(self, block_sizes: tuple[int, ...]) -> int:
        """With hashes of such blocks, which nobody may have worked out yet."""
        tokens = self.tokens
        hashes = sum([_HASH_BYTES * (tokens.size // size) for size in block_sizes])
        return len(self.body) + tokens.nbytes + self.marks.nbytes + hashes + _ENTRY_BYTES


class KnownChats:
    """The least recently used make room when ``max_bytes`` are taken. Thread-safe."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        # By some bytes in the latter half of each: chats that begin alike differ there, turns of one do not.
        self._kept: OrderedDict[bytes, tuple[KnownChat, int]] = OrderedDict()  # and what it costs
        self.kept_bytes = 0
        self._block_sizes: tuple[int, ...] = ()  # of hashes, as of the chats that were placed lately
        self._latest_hashes: dict[int, Hashes] = {}
        self._lock = threading.Lock()
        self._same_bytes = kernels.entry_points()[3]

    def find(self, body: Body, data: NDArray[np.uint8]) -> tuple[KnownChat | None, int]:
        """A chat whose body begins alike, and how many whole messages the two have in common."""
        size = _half_of(len(body))
        while size >= LONG_BYTES:
            name = _name(body, size)
            with self._lock:
                kept = self._kept.get(name)
                if kept is not None:
                    self._kept.move_to_end(name)
            if kept is not None:
                known = kept[0]
                marks = known.marks
                common = int(marks[ENDS].searchsorted(self._same_bytes(data, known.data), "right"))
                while common and marks.item(TOKEN_CUTS, common - 1) == NO_CUT:
                    common -= 1
                if common:
                    return known, common
            size >>= 1
        return None, 0

    def keep(self, chat: KnownChat) -> None:
        size = _half_of(chat.marks.item(ENDS, -1))
        if size < LONG_BYTES:
            return
        name = _name(chat.body, size)
        with self._lock:
            self._block_sizes = tuple(self._latest_hashes) or self._block_sizes
            self._latest_hashes = chat.hashes
            cost_bytes = chat.cost_bytes(self._block_sizes)
            if cost_bytes > self._max_bytes:
                return
            self._forget(name)
            self._kept[name] = chat, cost_bytes
            self.kept_bytes += cost_bytes
            chat.prompts.kept_bytes += cost_bytes
            while self.kept_bytes > self._max_bytes:
                self._forget(next(iter(self._kept)))

    def _forget(self, name: bytes) -> None:
        kept = self._kept.pop(name, None)
        if kept is not None:
            chat, cost_bytes = kept
            self.kept_bytes -= cost_bytes
            chat.prompts.kept_bytes -= cost_bytes


def _half_of(size: int) -> int:
    """The greatest power of two that is not above it."""
    return 1 << (size.bit_length() - 1) if size else 0


def _name(body: Body, size: int) -> bytes:
    """Bytes behind which a body has at most as many again."""
    return b"%d %b" % (size, bytes(body[size - _NAME_BYTES : size]))
