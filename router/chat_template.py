"""Chat templates, rendered as Hugging Face and vLLM do, so that the token ids agree with the engine's."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from router.errors import TokenizationError


class _Generation(Extension):
    """``{% generation %}`` marks what the assistant said, for training; rendering passes it through."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
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
            tree = environment.parse(source)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"the chat template is not valid: {error}") from error
        self._special_tokens = special_tokens
        self._keeps_parts = _iterates_content(tree)

    def render(self, document: dict[str, Any]) -> str:
        """The prompt text of a chat request. Raises TokenizationError."""
        messages = [_prepared(message, self._keeps_parts) for message in document["messages"]]
        continued = bool(document.get("continue_final_message"))
        generation_prompt = document.get("add_generation_prompt")
        variables: dict[str, Any] = {
            **self._special_tokens,
            "messages": messages,
            "tools": document.get("tools") if document.get("tool_choice") != "none" else None,
            "documents": document.get("documents"),
            "add_generation_prompt": not continued if generation_prompt is None else generation_prompt,
            **(document.get("chat_template_kwargs") or {}),
        }
        try:
            text = self._template.render(variables)
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise TokenizationError(f"the chat template failed: {error}") from error
        return _cut_after(text, messages[-1]) if continued else text


def _prepared(message: dict[str, Any], keeps_parts: bool) -> dict[str, Any]:
    """The message as vLLM gives it to templates: text parts joined, tool arguments parsed."""
    prepared = dict(message)
    content = message.get("content")
    if isinstance(content, list):
        texts = [_text(part) for part in content]
        prepared["content"] = (
            [{"type": "text", "text": text} for text in texts] if keeps_parts else "\n".join(texts)
        )
    elif content is None:
        prepared["content"] = [] if keeps_parts else ""
    elif keeps_parts:
        prepared["content"] = [{"type": "text", "text": content}]
    calls = message.get("tool_calls")
    if message.get("role") == "assistant" and isinstance(calls, list):
        prepared["tool_calls"] = [_parsed_call(call) for call in calls]
    return prepared


def _text(part: Any) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict) and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    raise TokenizationError(f"content part of type {kind!r} is not text")


def _parsed_call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"]) if function["arguments"] else {}
    except ValueError:
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def _cut_after(text: str, message: dict[str, Any]) -> str:
    """Leave the final message open, so that the model goes on with it."""
    content = message.get("content")
    if isinstance(content, list):
        content = content[-1]["text"] if content else ""
    final = str(content).strip()
    at = text.rfind(final)
    if at < 0:
        raise TokenizationError("the chat template does not show the final message as it is")
    return text[: at + len(final)]


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
