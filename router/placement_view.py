"""The prompt of a request of any API, written as the chat or completion that the model is given in the end.

Engines make a chat of `/v1/responses` and `/v1/messages` before they apply the template (vLLM's
`construct_input_messages` and `_convert_anthropic_to_openai_request`); what is said here must agree with that
to the token, or cached prefixes are not found. Placement alone reads it: engines get the client's bytes.
"""

from __future__ import annotations

import json
from typing import Any

from msgspec.structs import replace

from router.errors import TokenizationError
from router.inference import Endpoint, InferenceRequest

_TEXT_PARTS = frozenset(("text", "input_text", "output_text"))
_ENGINE_STATE = ("previous_response_id", "conversation", "prompt")
# What makes another prompt, or another cache, of the same token ids.
_NOT_TOKENS = (
    *("features", "image_data", "video_data", "audio_data", "input_embeds", "positional_embed_overrides"),
    *("session_params", "lora_path", "extra_key"),
)


def placement_view(request: InferenceRequest) -> InferenceRequest | None:
    """None where load alone decides. Raises TokenizationError where the chat cannot be known here."""
    document = request.document
    match request.endpoint:
        case Endpoint.CHAT | Endpoint.COMPLETIONS:
            return request
        case Endpoint.RESPONSES:
            return replace(request, endpoint=Endpoint.CHAT, parsed=_of_responses(document))
        case Endpoint.MESSAGES:
            return replace(request, endpoint=Endpoint.CHAT, parsed=_of_messages(document))
        case Endpoint.EMBEDDINGS:
            given = document.get("input")
            if isinstance(given, list) and isinstance(given[0], int | list):
                return replace(request, endpoint=Endpoint.COMPLETIONS, parsed={"prompt": given})
        case Endpoint.TOKENS:
            return _of_tokens(request, document["token_ids"])
        case Endpoint.GENERATE:
            return _of_tokens(request, document.get("text") or document.get("input_ids"))
    return None


def _of_tokens(request: InferenceRequest, prompt: Any) -> InferenceRequest:
    for name in _NOT_TOKENS:
        if request.document.get(name):
            raise TokenizationError(f"what {name!r} stands for is known to the engine alone")
    return replace(request, endpoint=Endpoint.COMPLETIONS, parsed={"prompt": prompt})


def _of_responses(document: dict[str, Any]) -> dict[str, Any]:
    for name in _ENGINE_STATE:
        if document.get(name) is not None:
            raise TokenizationError(f"what {name!r} stands for is known to the engine alone")
    messages: list[dict[str, Any]] = []
    if document.get("instructions"):
        messages.append({"role": "system", "content": document["instructions"]})
    given = document["input"]
    if isinstance(given, str):
        messages.append({"role": "user", "content": given})
    else:
        for item in given:
            _add_item(messages, item)
    view: dict[str, Any] = {"messages": messages}
    if document.get("tools"):
        view["tools"] = [_responses_tool(tool) for tool in document["tools"]]
    return _with_template_arguments(view, document)


def _add_item(messages: list[dict[str, Any]], item: dict[str, Any]) -> None:
    """Text, reasoning and calls of the assistant that follow each other make one message."""
    before = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
    kind = item.get("type") or "message"
    if kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        if before is None:
            messages.append({"role": "assistant", "tool_calls": [call]})
        else:
            before.setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        output = item.get("output")
        messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": _content(output)})
    elif kind == "reasoning":
        shown = item.get("content") or item.get("summary") or [{"text": ""}]
        _join(messages, before, _reasoning(_first_text(shown)))
    elif kind == "message" and isinstance(item.get("role"), str):
        content = item.get("content")
        if item["role"] == "assistant":
            said = content if isinstance(content, str) else _first_text(content)
            _join(messages, before, {"content": said})
        else:
            messages.append({"role": item["role"], "content": _content(content)})
    else:
        raise TokenizationError(f"an input item of type {kind!r} is not text")


def _join(messages: list[dict[str, Any]], before: dict[str, Any] | None, said: dict[str, Any]) -> None:
    if before is not None and not said.keys() & before.keys():
        before.update(said)
    else:
        messages.append({"role": "assistant", **said})


def _responses_tool(tool: Any) -> dict[str, Any]:
    if not isinstance(tool, dict) or tool.get("type") != "function":
        kind = tool.get("type") if isinstance(tool, dict) else type(tool).__name__
        raise TokenizationError(f"how the engine shows a tool of type {kind!r} is not known")
    known = {name: tool.get(name) for name in ("name", "description", "parameters")}
    function = known | {name: value for name, value in tool.items() if name not in known and name != "type"}
    return {"type": "function", "function": function}


def _of_messages(document: dict[str, Any]) -> dict[str, Any]:
    messages: list[dict[str, Any]] = []
    system = document.get("system")
    if system:
        text = system if isinstance(system, str) else "".join(_text(block) for block in system)
        messages.append({"role": "system", "content": text})
    for message in document["messages"]:
        if isinstance(message["content"], str):
            messages.append({"role": message["role"], "content": message["content"]})
        else:
            _add_blocks(messages, message["role"], message["content"])
    view: dict[str, Any] = {"messages": messages}
    if document.get("tools"):
        view["tools"] = [_anthropic_tool(tool) for tool in document["tools"]]
    return _with_template_arguments(view, document)


def _add_blocks(messages: list[dict[str, Any]], role: str, blocks: list[dict[str, Any]]) -> None:
    """Results of tools come before the text of the message that brings them."""
    parts: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    thought: list[str] = []
    for block in blocks:
        match block["type"]:
            case "tool_use":
                arguments = json.dumps(block.get("input") or {})
                function = {"name": block.get("name"), "arguments": arguments}
                calls.append({"id": block.get("id"), "type": "function", "function": function})
            case "tool_result" if role == "user":
                content = block.get("content") or ""
                text = content if isinstance(content, str) else "\n".join(_text(part) for part in content)
                messages.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": text})
            case "thinking":
                thought.append(str(block.get("thinking") or ""))
            case _:
                if text := _text(block):
                    parts.append({"type": "text", "text": text})
    message: dict[str, Any] = {"role": role}
    if thought:
        message |= _reasoning("".join(thought))
    if calls:
        message["tool_calls"] = calls
    if parts:
        message["content"] = parts[0]["text"] if len(parts) == 1 else parts
    if len(message) > 1:
        messages.append(message)


def _anthropic_tool(tool: Any) -> dict[str, Any]:
    if not isinstance(tool, dict) or not isinstance(tool.get("input_schema"), dict):
        raise TokenizationError("how the engine shows a tool without an input_schema is not known")
    schema = tool["input_schema"]
    parameters = schema if "type" in schema else {**schema, "type": "object"}
    function = {"name": tool.get("name"), "description": tool.get("description"), "parameters": parameters}
    return {"type": "function", "function": function}


def _reasoning(text: str) -> dict[str, str]:
    return {"reasoning": text, "reasoning_content": text}  # templates know it by either name


def _content(content: Any) -> str | list[dict[str, str]]:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise TokenizationError(f"content of type {type(content).__name__} is not text")
    return [{"type": "text", "text": _text(part)} for part in content]


def _first_text(parts: Any) -> str:
    return _text(parts[0]) if isinstance(parts, list) and parts else ""


def _text(part: Any) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type", "text") if isinstance(part, dict) else type(part).__name__
    text = part.get("text") if isinstance(part, dict) else None
    if not isinstance(text, str) or not (kind in _TEXT_PARTS or str(kind).endswith("_text")):
        raise TokenizationError(f"a content part of type {kind!r} is not text")
    return text


def _with_template_arguments(view: dict[str, Any], document: dict[str, Any]) -> dict[str, Any]:
    if document.get("chat_template_kwargs"):
        view["chat_template_kwargs"] = document["chat_template_kwargs"]
    return view
