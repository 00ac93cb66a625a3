"""Conversations as text: ShareGPT's JSON, OpenAI-style messages, and LMBenchmark's list of inputs.

They have no arrival times: all requests arrive at 0 until a rate is given.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import orjson

from simulator.workloads.fields import count_field, fault
from simulator.workloads.prefix_names import Context, PrefixNames
from simulator.workloads.records import TraceError, TraceRecord
from simulator.workloads.text import append_text, approximate_tokens

TEXT_BLOCK_TOKENS: Final = 16  # prompts are short: larger blocks would hide what they share

_ANSWERING = {"gpt", "chatgpt", "bing", "bard", "assistant", "model"}


def conversation_records(path: Path) -> Iterator[TraceRecord]:
    """One record per answer, with everything said before it as the prompt.

    Tokens are estimated from bytes. An item is ``{"id", "conversations": [{"from", "value"}]}``, ``{"messages":
    [{"role", "content"}]}`` or ``{"input", "output_length"}``; items without an answer give no record.
    """
    try:
        items = orjson.loads(path.read_bytes())
    except orjson.JSONDecodeError as error:
        raise TraceError(f"{path}: not valid JSON, perhaps cut off: {error}") from None
    if not isinstance(items, list):
        raise TraceError(f"{path}: not a list of conversations")
    names = PrefixNames(TEXT_BLOCK_TOKENS)
    for number, item in enumerate(items):
        yield from _conversation(f"{path}, conversation {number}", item, names, number)


def _conversation(place: str, item: Any, names: PrefixNames, number: int) -> Iterator[TraceRecord]:
    if not isinstance(item, dict):
        raise TraceError(f"{place}: not a JSON object")
    context = Context(names)
    if "input" in item:
        if not isinstance(item["input"], str) or not item["input"]:
            raise fault(place, item, "input", "a text that is not empty")
        append_text(context, item["input"])
        yield _record(context, count_field(place, item, "output_length", minimum=0), None)
        return
    turns_field = "messages" if "messages" in item else "conversations"
    turns = item.get(turns_field)
    if not isinstance(turns, list):
        raise fault(place, item, turns_field, "a list of turns")
    session_id = str(item.get("id", number))
    for index, turn in enumerate(turns):
        speaker, text = _turn(f"{place}, turn {index}", turn)
        if speaker in _ANSWERING and context.tokens:
            yield _record(context, approximate_tokens(text), session_id)
        append_text(context, f"{speaker}: {text}\n")


def _turn(place: str, turn: Any) -> tuple[str, str]:
    if not isinstance(turn, dict):
        raise TraceError(f"{place}: not a JSON object")
    speaker_field, text_field = ("role", "content") if "role" in turn else ("from", "value")
    for name in (speaker_field, text_field):
        if not isinstance(turn.get(name), str):
            raise fault(place, turn, name, "a text")
    return turn[speaker_field], turn[text_field]


def _record(context: Context, output_tokens: int, session_id: str | None) -> TraceRecord:
    return TraceRecord(
        *(0.0, context.tokens, output_tokens, context.hash_ids(), session_id), block_tokens=TEXT_BLOCK_TOKENS
    )
