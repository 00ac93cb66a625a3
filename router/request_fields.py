"""The fields of request bodies that the router relies on: what is wrong with them, and how to mend it."""

from __future__ import annotations

from typing import Any, NoReturn

from router.errors import RequestError

_SCORE_PAIRS = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))


def check_chat(document: dict[str, Any]) -> None:
    messages = _filled_list(document, "messages", "Send a list of objects with 'role' and 'content'.")
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            reject(f"messages[{index}]", f"messages[{index}] must be an object with a string 'role'.")


def check_completion(document: dict[str, Any]) -> None:
    prompt = document.get("prompt")
    if prompt is None:
        if document.get("prompt_embeds") is not None:
            return
        reject("prompt", "'prompt' is missing. Send a string, a list of token ids, or a list of either.")
    _text_or_list("prompt", prompt, "Send at least one character or token id.")


def check_responses(document: dict[str, Any]) -> None:
    given = document.get("input")
    if given is None:
        reject("input", "'input' is missing. Send a string or a list of input items.")
    _text_or_list("input", given, "Send at least one character or input item.")
    if isinstance(given, list):
        for index, item in enumerate(given):
            if not isinstance(item, dict):
                reject(f"input[{index}]", f"input[{index}] must be an object, not {json_type(item)}.")
    instructions = document.get("instructions")
    if instructions is not None and not isinstance(instructions, str):
        reject("instructions", f"'instructions' must be a string, not {json_type(instructions)}.")


def check_messages(document: dict[str, Any]) -> None:
    """Anthropic's: ``max_tokens`` is required, content is text or a list of blocks."""
    check_chat(document)
    for index, message in enumerate(document["messages"]):
        _text_or_blocks(f"messages[{index}].content", message.get("content"))
    if document.get("system") is not None:
        _text_or_blocks("system", document["system"])
    if integer(document, "max_tokens", minimum=1) is None:
        reject("max_tokens", "'max_tokens' is missing. Send the most tokens that the answer may have.")


def check_embeddings(document: dict[str, Any]) -> None:
    if document.get("input") is None and document.get("messages") is not None:
        check_chat(document)
        return
    given = document.get("input")
    if given is None:
        reject("input", "'input' is missing. Send a string, a list of token ids, or a list of either.")
    _text_or_list("input", given, "Send at least one character or token id.")


def check_rerank(document: dict[str, Any]) -> None:
    query = document.get("query")
    if query is None:
        reject("query", "'query' is missing. Send what the documents are compared with.")
    if not isinstance(query, str | dict):
        reject("query", f"'query' must be a string or an object, not {json_type(query)}.")
    _filled_list(document, "documents", "Send the list of documents to rank.")


def check_score(document: dict[str, Any]) -> None:
    first, second = next(
        (pair for pair in _SCORE_PAIRS if all(document.get(name) is not None for name in pair)), (None, None)
    )
    if first is None or second is None:
        begun = next(
            (pair for pair in _SCORE_PAIRS if any(name in document for name in pair)), _SCORE_PAIRS[0]
        )
        missing = next(name for name in begun if document.get(name) is None)
        known = "; ".join(f"{one} and {other}" for one, other in _SCORE_PAIRS)
        reject(missing, f"'{missing}' is missing. Send both texts of a pair: {known}.")
    for name in (first, second):
        if not isinstance(document[name], str | list | dict) or not document[name]:
            reject(name, f"'{name}' must be a text or a list of texts, not {json_type(document[name])}.")


def check_tokens(document: dict[str, Any]) -> None:
    """vLLM's: one prompt of token ids."""
    _filled_list(document, "token_ids", "Send the prompt's token ids.")
    if not isinstance(document.get("sampling_params"), dict):
        found = json_type(document.get("sampling_params"))
        reject("sampling_params", f"'sampling_params' must be an object, not {found}.")


def check_generate(document: dict[str, Any]) -> None:
    """SGLang's: a text, token ids, or a list of either."""
    given = [name for name in ("text", "input_ids", "input_embeds") if document.get(name) is not None]
    if len(given) != 1:
        found = " and ".join(given) or "neither"
        reject(
            "text", f"Send 'text', a string, or 'input_ids', a list of token ids: one of them, not {found}."
        )
    _text_or_list(given[0], document[given[0]], "Send at least one character or token id.")
    params = document.get("sampling_params")
    if params is not None and not isinstance(params, dict | list):
        reject("sampling_params", f"'sampling_params' must be an object, not {json_type(params)}.")


def check_tokenize(document: dict[str, Any]) -> None:
    if document.get("messages") is not None:
        check_chat(document)
        return
    prompt = document.get("prompt")
    if prompt is None:
        reject("prompt", "'prompt' is missing. Send a string, or 'messages' for a chat.")
    if not isinstance(prompt, str):
        reject("prompt", f"'prompt' must be a string, not {json_type(prompt)}.")


def check_detokenize(document: dict[str, Any]) -> None:
    tokens = document.get("tokens")
    if tokens is None:
        reject("tokens", "'tokens' is missing. Send a list of token ids.")
    if not isinstance(tokens, list):
        reject("tokens", f"'tokens' must be a list of token ids, not {json_type(tokens)}.")
    for index, token in enumerate(tokens):
        if not isinstance(token, int) or isinstance(token, bool) or token < 0:
            reject(f"tokens[{index}]", f"tokens[{index}] must be a token id, not {json_type(token)}.")


def integer(document: dict[str, Any], name: str, *, minimum: int) -> int | None:
    value = document.get(name)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool):
        reject(name, f"'{name}' must be an integer, not {json_type(value)}.")
    if value < minimum:
        reject(name, f"'{name}' must be at least {minimum}, not {value}.")
    return value


def reject(param: str | None, message: str) -> NoReturn:
    """Raises RequestError (400)."""
    raise RequestError(400, message, param=param)


def json_type(value: object) -> str:
    if value is None:
        return "null"
    for kind, name in ((bool, "a boolean"), (int, "an integer"), (float, "a number"), (str, "a string")):
        if isinstance(value, kind):
            return name
    return "a list" if isinstance(value, list) else "an object"


def _filled_list(document: dict[str, Any], name: str, remedy: str) -> list[Any]:
    value = document.get(name)
    if value is None:
        reject(name, f"'{name}' is missing. {remedy}")
    if not isinstance(value, list):
        reject(name, f"'{name}' must be a list, not {json_type(value)}.")
    if not value:
        reject(name, f"'{name}' is empty. {remedy}")
    return value


def _text_or_list(name: str, value: object, remedy: str) -> None:
    if not isinstance(value, str | list):
        reject(name, f"'{name}' must be a string or a list, not {json_type(value)}.")
    if not value:
        reject(name, f"'{name}' is empty. {remedy}")


def _text_or_blocks(name: str, value: object) -> None:
    if isinstance(value, str):
        return
    if not isinstance(value, list):
        reject(name, f"'{name}' must be a string or a list of content blocks, not {json_type(value)}.")
    for index, block in enumerate(value):
        if not isinstance(block, dict) or not isinstance(block.get("type"), str):
            reject(f"{name}[{index}]", f"{name}[{index}] must be an object with a string 'type'.")
