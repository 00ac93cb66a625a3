"""Chat templates, rendered as Hugging Face and vLLM do, so that the token ids agree with the engine's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jinja2
from jinja2 import nodes

from router.chat_memory import FEWEST_MESSAGES, ChatMemory
from router.chat_messages import template_message, template_tools
from router.errors import TokenizationError
from router.message_loop import MessageLoops
from router.template_environment import rendered, template_environment
from router.template_turns import NotPlainError

_SEEN_BYTES = 32 * 1024 * 1024
_MARK = "END_OF_THE_FINAL_MESSAGE "  # found again in what the template makes of it; the space shows trimming


@dataclass(frozen=True, slots=True)
class _Seen:
    """Messages of a request, and what the template sees of them."""

    given: list[Any]
    messages: list[dict[str, Any]]

    @property
    def cost_bytes(self) -> int:
        pairs = zip(self.given, self.messages, strict=True)
        return sum(len(seen["content"]) for given, seen in pairs if given is not seen)


class ChatTemplate:
    """A compiled template.

    ``special_tokens`` are the variables like ``bos_token`` it may use. Where it ``keeps_parts``, messages have
    their content as a list of text parts.
    """

    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        environment = template_environment()
        try:
            self._template = environment.from_string(source)
            self._template.globals = dict(
                self._template.globals
            )  # a chain of maps is slow to copy, once a render
            tree = environment.parse(source)
            self._of_long = _of_long_chats(environment, source)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"the chat template is not valid: {error}") from error
        self._seen: ChatMemory[_Seen] = ChatMemory(_SEEN_BYTES)
        self.source = source
        self.special_tokens = special_tokens
        self.keeps_parts = _iterates_content(tree)

    def render(self, document: dict[str, Any]) -> str:
        """The prompt text of a chat request. Raises TokenizationError."""
        continued = bool(document.get("continue_final_message"))
        generation_prompt = document.get("add_generation_prompt")
        final = ""
        try:
            given, template = document["messages"], self._template
            if self._of_long is None or continued or len(given) < FEWEST_MESSAGES:
                messages = self._messages(given)
            else:
                messages, template = self._messages_of_long(given), self._of_long
            if continued:
                messages[-1] = dict(messages[-1])  # which may be the client's own
                final = _mark_final(messages[-1])
            variables: dict[str, Any] = {
                **self.special_tokens,
                "messages": messages,
                "tools": template_tools(document.get("tools")),
                "documents": document.get("documents"),
                "add_generation_prompt": not continued if generation_prompt is None else generation_prompt,
                **(document.get("chat_template_kwargs") or {}),
            }
            text = rendered(template, variables)
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            raise TokenizationError(f"the chat template failed: {error}") from error
        return _cut_at_mark(text, final) if continued else text

    def _messages(self, given: list[Any]) -> list[dict[str, Any]]:
        return [template_message(message, self.keeps_parts) for message in given]

    def _messages_of_long(self, given: list[Any]) -> list[dict[str, Any]]:
        """Of a chat's new turn, all but the new ones are the same objects as before."""
        before, known = self._seen.find(given)
        messages = self._messages(given[known:])
        if before is not None:
            messages = before.messages[:known] + messages
        self._seen.keep(given, _Seen(given, messages))
        return messages


def _of_long_chats(environment: jinja2.Environment, source: str) -> jinja2.Template | None:
    """The template that remembers what it wrote; None where that might be another text the next time."""
    try:
        return MessageLoops(environment, source).template
    except NotPlainError:
        return None


def _mark_final(message: dict[str, Any]) -> str:
    """Put the mark behind the message's last text, which is returned. Raises TokenizationError without one."""
    content = message["content"]
    if isinstance(content, str):
        message["content"] = content + _MARK
        return content
    if not content:
        raise TokenizationError("continue_final_message is set, but the final message has no text")
    text = content[-1]["text"]
    content[-1]["text"] = text + _MARK
    return str(text)


def _cut_at_mark(text: str, final: str) -> str:
    """The prompt up to the mark, so that the model goes on with the final message."""
    at = text.rfind(_MARK.strip())
    if at < 0 or final.strip() not in text:
        raise TokenizationError("the chat template does not show the final message as it is")
    # Without the space at the mark's end the template trims messages: then so is this one.
    return text[:at] if text.startswith(_MARK, at) else text[:at].rstrip()


def _names_content(node: nodes.Node) -> bool:
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    return (
        isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    )


def _iterates_content(tree: nodes.Template) -> bool:
    """Whether the template loops over a message's content, and so expects a list of parts."""
    aliases = {
        assignment.target.name
        for assignment in tree.find_all(nodes.Assign)
        if isinstance(assignment.target, nodes.Name) and _names_content(assignment.node)
    }
    for loop in tree.find_all(nodes.For):
        subject = loop.iter
        if _names_content(subject) or (isinstance(subject, nodes.Name) and subject.name in aliases):
            return True
    return False
