"""What a chat template writes of chats by their messages' roles: texts, and contents between them."""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, Final

import jinja2
from jinja2.runtime import Context

from router.chat_messages import template_message
from router.chat_template import ChatTemplate
from router.unknown_text import Assumptions, ContentReadError, UnknownText
from router.unknown_text_environment import escapes, joined, unknown_text_environment

MAX_SHAPES: Final = 4_096
MAX_BYTES: Final = 32 * 1024 * 1024
_REFERENCE_BYTES: Final = 8
_SHAPE_BYTES: Final = 1_024  # besides its texts and references
_ASSUMPTION_BYTES: Final = 128
_ADDRESS: Final = " at 0x"  # in the texts of objects that have no better one, which are others each time


@dataclass(frozen=True, slots=True)
class Shape:
    """What a template writes of chats by their roles: ``literals[0]``, a content, ``literals[1]``, and so on.

    It holds where contents are as ``absent`` and ``not_blank`` say. White space is what ``str.strip`` takes.
    """

    literals: tuple[str, ...]  # one more than contents
    contents: tuple[int, ...]  # the index of the message whose content is written there
    stripped: tuple[int, ...]  # whether without the white space at its LEFT and RIGHT (unknown_text) end
    absent: tuple[tuple[int, str], ...]  # index of a message, and what must not be within its content
    not_blank: tuple[int, ...]  # indices of messages whose content must be more than white space


class TemplateShapes:
    """Shapes of a template's prompts; the latest are remembered. Thread-safe."""

    def __init__(
        self, template: ChatTemplate, max_shapes: int = MAX_SHAPES, max_bytes: int = MAX_BYTES
    ) -> None:
        self._template = _with_unknown_text(template.source)
        self._keeps_parts = template.keeps_parts
        self._variables = {
            **({} if self._template is None else self._template.globals),
            **template.special_tokens,
            "tools": None,
            "documents": None,
            "add_generation_prompt": True,
        }
        self._max_shapes, self._max_bytes = max_shapes, max_bytes
        self._kept: OrderedDict[tuple[str, ...], tuple[Shape | None, int]] = OrderedDict()
        self.kept_bytes = 0
        self._lock = threading.Lock()

    def of(self, roles: tuple[str, ...]) -> Shape | None:
        """Of chats whose messages have these roles and a text as content, and nothing else.

        They ask for a generation prompt, as they do by default, and come without tools, documents and arguments of
        the template. None where the template reads contents, may write another text the next time, or fails.
        """
        if self._template is None:
            return None
        with self._lock:
            found = self._kept.get(roles)
            if found is not None:
                self._kept.move_to_end(roles)
                return found[0]
        shape = self._rendered(roles)
        self._keep(tuple(map(sys.intern, roles)), shape)
        return shape

    def _rendered(self, roles: tuple[str, ...]) -> Shape | None:
        template = self._template
        assert template is not None
        assumptions = Assumptions()
        messages = [
            _message(role, UnknownText.of_message(index, assumptions), self._keeps_parts)
            for index, role in enumerate(roles)
        ]
        variables = {**self._variables, "messages": messages}
        context = Context(template.environment, variables, template.name, template.blocks, template.globals)
        try:
            text = joined(template.root_render_func(context))
        except (ContentReadError, Exception):
            return None
        return _shape(text, assumptions)

    def _keep(self, roles: tuple[str, ...], shape: Shape | None) -> None:
        cost_bytes = _cost_bytes(roles, shape)
        if cost_bytes > self._max_bytes:
            return
        with self._lock:
            if roles in self._kept:
                return
            self._kept[roles] = (shape, cost_bytes)
            self.kept_bytes += cost_bytes
            while self.kept_bytes > self._max_bytes or len(self._kept) > self._max_shapes:
                _, (_, freed_bytes) = self._kept.popitem(last=False)
                self.kept_bytes -= freed_bytes


def _with_unknown_text(source: str) -> jinja2.Template | None:
    environment = unknown_text_environment()
    try:
        return None if escapes(environment.parse(source)) else environment.from_string(source)
    except ContentReadError:  # of what is found out when it is compiled
        return None


def _message(role: str, content: UnknownText, keeps_parts: bool) -> dict[str, Any]:
    """As ``template_message`` makes it of this content."""
    seen = template_message({"role": role, "content": ""}, keeps_parts)
    return {**seen, "content": [{"type": "text", "text": content}] if keeps_parts else content}


def _shape(text: str | UnknownText, assumptions: Assumptions) -> Shape | None:
    literals, contents, stripped = [""], [], []
    for piece in (text,) if isinstance(text, str) else text.pieces:
        if isinstance(piece, str):
            literals[-1] = piece
        else:
            message, sides = piece
            contents.append(message)
            stripped.append(sides)
            literals.append("")
    if any(_ADDRESS in literal.lower() for literal in set(literals)):
        return None
    same: dict[str, str] = {}  # turns are alike: one object for all
    return Shape(
        tuple(same.setdefault(literal, literal) for literal in literals),
        tuple(contents),
        tuple(stripped),
        tuple(assumptions.absent),
        tuple(assumptions.not_blank),
    )


def _cost_bytes(roles: tuple[str, ...], shape: Shape | None) -> int:
    texts = set(roles)
    cost_bytes = _SHAPE_BYTES + _REFERENCE_BYTES * len(roles)
    if shape is not None:
        texts.update(shape.literals)
        cost_bytes += _REFERENCE_BYTES * 3 * len(shape.literals) + _ASSUMPTION_BYTES * len(shape.absent)
        cost_bytes += _REFERENCE_BYTES * len(shape.not_blank)
    return cost_bytes + sum(map(sys.getsizeof, texts))
