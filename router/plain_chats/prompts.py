"""A tokenizer and its chat template as plain chats need them."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Final

import numpy as np

from router.plain_chats import scanning
from router.plain_chats.layout import Layout, layout_of
from router.template_shapes import TemplateShapes

if TYPE_CHECKING:
    from router.chat_template import ChatTemplate
    from router.segments import Segmentation
    from router.word_tokens import WordTokens

MAX_LAYOUT_BYTES: Final = 32 * 1024 * 1024
_ENTRY_BYTES: Final = 400  # of a dictionary's slot and a link of the order


class PlainPrompts:
    """``layout`` tells what is written around contents; counts characters of prompts that were known, and new.

    The new ones are counted by the kernels, in ``characters``.

    The latest layouts are remembered, as far as ``max_layout_bytes`` last. Thread-safe.
    """

    def __init__(
        self,
        template: ChatTemplate,
        segmentation: Segmentation,
        words: WordTokens,
        *,
        max_layout_bytes: int = MAX_LAYOUT_BYTES,
    ) -> None:
        self.words = words
        self.kept_bytes = 0
        self.known_characters = 0
        self.characters = np.zeros(1, np.int64)
        self.layout_bytes = 0
        self._separators = segmentation.separators
        self._shapes = TemplateShapes(template)
        self._layouts: OrderedDict[bytes, Layout | None] = OrderedDict()
        self._max_layout_bytes = max_layout_bytes
        self._lock = threading.Lock()

    @property
    def new_characters(self) -> int:
        return self.characters.item(0)

    def layout(self, roles: bytes) -> Layout | None:
        """Of chats whose messages have these roles, by their numbers; None where it depends on more than that."""
        with self._lock:
            if roles in self._layouts:
                self._layouts.move_to_end(roles)
                return self._layouts[roles]
        shape = self._shapes.of(tuple(scanning.ROLES[role] for role in roles))
        layout = None if shape is None else layout_of(roles, shape, self._separators)
        with self._lock:
            if roles not in self._layouts:
                self._layouts[roles] = layout
                self.layout_bytes += _cost_bytes(roles, layout)
            while self.layout_bytes > self._max_layout_bytes:
                self.layout_bytes -= _cost_bytes(*self._layouts.popitem(last=False))
        return layout


def _cost_bytes(roles: bytes, layout: Layout | None) -> int:
    return _ENTRY_BYTES + len(roles) + (0 if layout is None else layout.cost_bytes)
