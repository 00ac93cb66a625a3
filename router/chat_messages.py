"""Messages and tools of a chat request as vLLM hands them to a chat template.

Source: ``parse_chat_messages`` of vLLM's ``entrypoints/chat_utils.py`` and its protocol's pydantic models.
"""

from __future__ import annotations

import json
from typing import Any

from router.errors import TokenizationError

_TEXT_OF = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}
_SKIPPED_WHEN_NULL = ("text", "refusal")


def template_message(message: dict[str, Any], keeps_parts: bool) -> dict[str, Any]:
    """What a template sees of a message: fields that vLLM does not know are left out.

    Content becomes a list of text parts where the template ``keeps_parts``, else one text. Raises TokenizationError
    for parts that are not text: what stands for an image in a prompt is known to the engine only. A message that
    would come out as it is, as most do, is not copied: templates cannot change it.
    """
    role, content = message["role"], message.get("content")
    if type(content) is str and not keeps_parts and len(message) == 2 and role != "developer":
        first, _ = message
        if first == "role":  # the order shows where a template prints messages
            return message
    if isinstance(content, list):
        texts = [text for part in content if (text := _text(part)) is not None]
    elif content is None or isinstance(content, str):
        texts = [] if content is None else [content]
    else:
        raise TokenizationError(f"message content is neither text nor a list: {type(content).__name__}")
    seen: dict[str, Any] = {
        "role": role,
        "content": [{"type": "text", "text": text} for text in texts] if keeps_parts else "\n".join(texts),
    }
    if role == "assistant":
        calls = message.get("tool_calls")
        if calls:
            seen["tool_calls"] = [_with_parsed_arguments(call) for call in calls]
        reasoning = message.get("reasoning")
        if reasoning is None:
            reasoning = message.get("reasoning_content")
        if reasoning is not None:
            seen["reasoning"] = seen["reasoning_content"] = reasoning
    elif role == "tool" and "tool_call_id" in message:
        seen["tool_call_id"] = message["tool_call_id"]
    elif role == "developer":
        seen["tools"] = message.get("tools")
    if isinstance(message.get("name"), str):
        seen["name"] = message["name"]
    return seen


def template_tools(tools: Any) -> list[dict[str, Any]] | None:
    """Tools with their known fields in vLLM's order, null where they are missing, and then the others.

    ``tool_choice`` changes nothing, as in an engine without ``--exclude-tools-when-tool-choice-none``.
    """
    return None if tools is None else [_tool(tool) for tool in tools]


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    function = {"name": None, "description": None, "parameters": None, **tool["function"]}
    return {"type": "function", "function": None} | tool | {"function": function}


def _text(part: Any) -> str | None:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    if isinstance(part, dict) and kind in _TEXT_OF and part.get("uuid") is None:
        text = part.get(_TEXT_OF[kind])
        if isinstance(text, str):
            return text
        if text is None and kind in _SKIPPED_WHEN_NULL:
            return None
    raise TokenizationError(f"content part of type {kind!r} is not text")


def _with_parsed_arguments(call: dict[str, Any]) -> dict[str, Any]:
    """Templates expect the arguments of a call as an object, OpenAI's clients send them as JSON text."""
    function = call["function"]
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    return {**call, "function": {**function, "arguments": arguments}}
