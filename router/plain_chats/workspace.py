"""What the kernels read and write for one chat after the other."""

from __future__ import annotations

import threading
from typing import Final

import numpy as np

from router.plain_chats import kernels as k
from router.plain_chats import scanning as s
from router.plain_chats.layout import Layout
from router.plain_chats.prompts import PlainPrompts
from router.plain_chats.writing import PLACED

_SMALL_BYTES: Final = 16_384


class Workspace:
    """Arrays that are kept from one chat to the next: fresh memory would cost more than what is done with it.

    It remembers the last chat's model, whose tables of words are read under ``lock``, and the layouts that its
    chats of few messages had last: where the next chat has the same, the kernel finds them itself.
    """

    def __init__(self) -> None:
        self.work = np.zeros(k.WORK, np.int64)
        self.address = int(self.work.ctypes.data)
        self.facts = self.work[k.FACTS_FIRST : k.FACTS_FIRST + s.FACTS]
        self.facts_before = self.work[k.FACTS_BEFORE : k.FACTS_BEFORE + s.FACTS]
        self.messages = np.empty(s.MESSAGE * k.MOST_MESSAGES, np.int64)
        self.roles = np.empty(k.MOST_MESSAGES, np.uint8)
        self.placed = np.empty(PLACED * k.MOST_MESSAGES, np.int64)
        self.places = np.empty(2 * k.PLACES_A_MESSAGE * (k.MOST_MESSAGES + 1), np.int64)
        for word, array in (
            (k.MESSAGES_AT, self.messages),
            (k.SCANNED_ROLES_AT, self.roles),
            (k.PLACED_AT, self.placed),
            (k.PLACES_AT, self.places),
        ):
            self.work[word] = array.ctypes.data
        self.make_room(_SMALL_BYTES)
        self.model = ""
        self.prompts: PlainPrompts | None = None
        self.lock = threading.Lock()
        self._name = np.empty(0, np.uint8)
        self._layouts: list[Layout | None] = [None] * k.MOST_GUESSED

    def make_room(self, size: int) -> None:
        """For a text of so many bytes."""
        self.text = np.empty(size, np.uint8)
        self.tokens = np.empty(size, np.uint32)
        self.work[k.TEXT_AT], self.work[k.TOKENS_AT] = self.text.ctypes.data, self.tokens.ctypes.data
        self.work[k.ROOM] = size

    def written(self) -> str:
        """The text of the present chat's prompt, as far as it is new."""
        return self.text[: self.work.item(k.SIZE)].tobytes().decode()

    def take(self, model: str, prompts: PlainPrompts) -> None:
        """The present chat's, whose tokenizer and template these are."""
        if model == self.model and prompts is self.prompts:
            return
        self.model, self.prompts, self.lock = model, prompts, prompts.words.lock
        self._name = np.frombuffer(model.encode(), np.uint8)
        work = self.work
        work[k.MODEL_AT], work[k.MODEL_BYTES] = self._name.ctypes.data, self._name.size
        work[k.TABLES_AT] = prompts.words.tables_address
        work[k.CHARACTERS_AT] = prompts.characters.ctypes.data
        work[k.LAYOUTS : k.LAYOUTS + k.MOST_GUESSED] = 0
        self._layouts = [None] * k.MOST_GUESSED

    def remember(self, layout: Layout) -> None:
        """It will be found for chats that are short."""
        messages = layout.roles.size
        if messages < k.MOST_GUESSED and layout.holds_always:
            self._layouts[messages] = layout
            self.work[k.LAYOUTS + messages] = layout.address
