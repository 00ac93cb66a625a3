"""A tokenizer and its chat template as plain chats need them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from router.plain_chats import scanning
from router.plain_chats.layout import Layout, layout_of
from router.template_shapes import TemplateShapes

if TYPE_CHECKING:
    from router.chat_template import ChatTemplate
    from router.segments import Segmentation
    from router.word_tokens import WordTokens

_MOST_LAYOUTS = 1_024


class PlainPrompts:
    """``layout`` tells what is written around contents; counts characters of prompts that were known, and new."""

    def __init__(self, template: ChatTemplate, segmentation: Segmentation, words: WordTokens) -> None:
        self.words = words
        self.kept_bytes = 0
        self.known_characters = 0
        self.new_characters = 0
        self._separators = segmentation.separators
        self._shapes = TemplateShapes(template)
        self._layouts: dict[bytes, Layout | None] = {}

    def layout(self, roles: bytes) -> Layout | None:
        """Of chats whose messages have these roles, by their numbers; None where it depends on more than that."""
        try:
            return self._layouts[roles]
        except KeyError:
            pass
        shape = self._shapes.of(tuple(scanning.ROLES[role] for role in roles))
        layout = None if shape is None else layout_of(shape, self._separators)
        while len(self._layouts) >= _MOST_LAYOUTS:
            del self._layouts[next(iter(self._layouts))]
        self._layouts[roles] = layout
        return layout
