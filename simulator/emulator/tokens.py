"""Text to token ids: the tokenizer and the model's chat template, rendered as vLLM renders it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import jinja2
import jinja2.sandbox
from tokenizers import Tokenizer

TOKENIZER_FOLDER: Final = Path(__file__).parent / "tokenizer"

Message = Mapping[str, Any]


class TemplateError(ValueError):
    """The messages cannot be rendered; the text says why."""


class ChatTokenizer:
    """A tokenizer with its chat template, from a folder as Hugging Face models ship it."""

    def __init__(self, folder: Path = TOKENIZER_FOLDER) -> None:
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        self.eos_token = _content(config["eos_token"])
        eos_id = self._tokenizer.token_to_id(self.eos_token)
        if eos_id is None:
            raise ValueError(f"the tokenizer in {folder} has no token {self.eos_token!r}")
        self.eos_id: int = eos_id
        self.vocabulary_size: int = self._tokenizer.get_vocab_size()
        self._special = {name: _content(config.get(name)) for name in ("bos_token", "eos_token", "pad_token")}
        self._template = _environment().from_string(config["chat_template"])

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=skip_special_tokens)
        return text

    def vocabulary(self) -> dict[str, int]:
        """Token (in the byte-level alphabet) to id."""
        entries: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=False)
        return entries

    def token_strings(self, tokens: Sequence[int]) -> list[str]:
        return [self._tokenizer.id_to_token(token) or "" for token in tokens]

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
        template_arguments: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text of a conversation; `TemplateError` if the template refuses it."""
        try:
            return self._template.render(
                messages=[_plain(message) for message in messages],
                tools=[_tool(tool) for tool in tools] if tools else None,
                add_generation_prompt=add_generation_prompt,
                **self._special,
                **(template_arguments or {}),
            )
        except (jinja2.TemplateError, TypeError) as error:
            raise TemplateError(f"The chat template refused the messages: {error}") from error


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """As vLLM's pydantic models write it: known fields first, null where they are missing."""
    function = {"name": None, "description": None, "parameters": None, **tool["function"]}
    return {"type": "function", "function": None, **tool} | {"function": function}


def _content(token: Any) -> Any:
    """Special tokens are strings, or objects with their text in ``content``."""
    return token["content"] if isinstance(token, dict) else token


def _environment() -> jinja2.Environment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    return environment


def _to_json(value: Any, indent: int | None = None) -> str:
    # Jinja's own filter escapes HTML; templates are written against the plain one of transformers.
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _plain(message: Message) -> dict[str, Any]:
    """A message as templates expect it: text content as one string, call arguments as objects."""
    plain = dict(message)
    content = plain.get("content")
    if isinstance(content, list):
        plain["content"] = "\n".join(_part_text(part) for part in content)
    if plain.get("tool_calls"):
        plain["tool_calls"] = [_plain_call(call) for call in plain["tool_calls"]]
    return plain


def _part_text(part: Any) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict) and part.get("type") in ("text", "input_text", "output_text", "refusal"):
        return str(part.get("text", part.get("refusal", "")))
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    raise TemplateError(f"Content parts of type {kind!r} are not supported: this model reads text only.")


def _plain_call(call: Any) -> Any:
    if not isinstance(call, dict) or not isinstance(call.get("function"), dict):
        return call
    function = dict(call["function"])
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            function["arguments"] = json.loads(arguments) if arguments else {}
        except ValueError as error:
            raise TemplateError(f"The arguments of a tool call are not JSON: {error}") from error
    return {**call, "function": function}
