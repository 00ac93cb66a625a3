"""Chat templates, rendered as Hugging Face and vLLM do, so that the token ids agree with the engine's."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from router.chat_messages import template_message, template_tools
from router.errors import TokenizationError

_DICT_ATTRIBUTES = frozenset(dir(dict))
_MARK = "END_OF_THE_FINAL_MESSAGE "  # found again in what the template makes of it; the space shows trimming


class _Generation(Extension):
    """``{% generation %}`` marks what the assistant said, for training; rendering passes it through."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Environment(ImmutableSandboxedEnvironment):
    def getattr(self, obj: Any, attribute: str) -> Any:
        """As Jinja's own, which takes longer: it tries a dictionary's attributes before its keys.

        What a template reads of its loops and namespaces is safe unless it begins with an underscore, or is called.
        """
        if type(obj) is dict and attribute not in _DICT_ATTRIBUTES:
            try:
                return obj[attribute]
            except KeyError:
                return self.undefined(obj=obj, name=attribute)
        if (type(obj) is Namespace or type(obj) is LoopContext) and not attribute.startswith("_"):
            value = getattr(obj, attribute, None)
            if value is not None and not callable(value):
                return value
        return super().getattr(obj, attribute)


def _environment() -> _Environment:
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike Jinja's own filter, escapes nothing for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


class ChatTemplate:
    """A compiled template. ``special_tokens`` are the variables like ``bos_token`` it may use."""

    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        environment = _environment()
        try:
            self._template = environment.from_string(source)
            self._template.globals = dict(
                self._template.globals
            )  # a chain of maps is slow to copy, once a render
            tree = environment.parse(source)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"the chat template is not valid: {error}") from error
        self._special_tokens = special_tokens
        self._keeps_parts = _iterates_content(tree)

    def render(self, document: dict[str, Any]) -> str:
        """The prompt text of a chat request. Raises TokenizationError."""
        continued = bool(document.get("continue_final_message"))
        generation_prompt = document.get("add_generation_prompt")
        final = ""
        try:
            messages = [template_message(message, self._keeps_parts) for message in document["messages"]]
            if continued:
                final = _mark_final(messages[-1])
            variables: dict[str, Any] = {
                **self._special_tokens,
                "messages": messages,
                "tools": template_tools(document.get("tools")),
                "documents": document.get("documents"),
                "add_generation_prompt": not continued if generation_prompt is None else generation_prompt,
                **(document.get("chat_template_kwargs") or {}),
            }
            text = self._template.render(variables)
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            raise TokenizationError(f"the chat template failed: {error}") from error
        return _cut_at_mark(text, final) if continued else text


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
