"""What a chat template writes of chats by their messages' roles: texts, and contents between them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import jinja2
from jinja2.runtime import Context

from router.chat_messages import template_message
from router.chat_template import ChatTemplate
from router.unknown_text import Assumptions, ContentReadError, UnknownText
from router.unknown_text_environment import escapes, joined, unknown_text_environment

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
    """Shapes of a template's prompts. Thread-safe."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = _with_unknown_text(template.source)
        self._keeps_parts = template.keeps_parts
        self._variables = {
            **({} if self._template is None else self._template.globals),
            **template.special_tokens,
            "tools": None,
            "documents": None,
            "add_generation_prompt": True,
        }

    def of(self, roles: tuple[str, ...]) -> Shape | None:
        """Of chats whose messages have these roles and a text as content, and nothing else.

        They ask for a generation prompt, as they do by default, and come without tools, documents and arguments of
        the template. None where the template reads contents, may write another text the next time, or fails.
        """
        template = self._template
        if template is None:
            return None
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
