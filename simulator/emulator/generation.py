"""What the emulated model says: text that depends on the prompt's tokens and nothing else.

Every token is a whole word with a leading space that the tokenizer gives back as the same single id, so a
client that sends the answer back in its next turn finds the answer's KV blocks again. The same prompt gets
the same answer from any instance, streamed or not, aggregated or disaggregated; a shorter limit gives a
prefix of it.
"""

from __future__ import annotations

import hashlib
import json
import random
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

from simulator.emulator.tokens import ChatTokenizer

SHORTEST_TOKENS: Final = 32
LONGEST_TOKENS: Final = 160
_SPACE: Final = "\u0120"  # a leading space in the byte-level alphabet


@dataclass(frozen=True, slots=True)
class SamplingLimits:
    """What ends an answer. ``max_tokens`` is at least 1."""

    max_tokens: int
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call to a function, ``arguments`` in JSON (cut short if a limit cut the answer)."""

    call_id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Answer:
    """``pieces[i]`` is the text that token ``i`` adds: to the message, or to the call's arguments."""

    tokens: tuple[int, ...]
    pieces: tuple[str, ...]
    finish_reason: str
    stop_reason: str | None = None
    tool_call: ToolCall | None = None

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def first_token(self) -> Answer:
        """What an engine answers that computes the prompt only."""
        if len(self.tokens) == 1:
            return self
        return Answer(self.tokens[:1], self.pieces[:1], "length")


class Writer:
    """Plans answers with the words of a tokenizer's vocabulary."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer
        self._words: list[int] = []
        self._text: dict[int, str] = {}
        for entry, token in sorted(tokenizer.vocabulary().items(), key=lambda item: item[1]):
            word = entry.removeprefix(_SPACE)
            if len(word) < 3 or word == entry or not (word.isascii() and word.isalpha() and word.islower()):
                continue
            text = f" {word}"
            if tokenizer.encode(text, add_special_tokens=False) == [token]:
                self._words.append(token)
                self._text[token] = text
        if not self._words:
            raise ValueError("the tokenizer's vocabulary has no whole lower-case words")

    def answer(self, prompt: Sequence[int], choice: int, limits: SamplingLimits) -> Answer:
        """The plain-text answer to a prompt."""
        seed = _seed(prompt, choice)
        natural_tokens = SHORTEST_TOKENS + seed % (LONGEST_TOKENS - SHORTEST_TOKENS + 1)
        natural_tokens = max(natural_tokens, limits.min_tokens + 1)
        ends = not limits.ignore_eos and natural_tokens <= limits.max_tokens
        words = natural_tokens - 1 if ends else limits.max_tokens
        tokens = random.Random(seed).choices(self._words, k=words)
        pieces = [self._text[token] for token in tokens]
        if ends:
            tokens.append(self._tokenizer.eos_id)
            pieces.append("")
        answer = Answer(tuple(tokens), tuple(pieces), "stop" if ends else "length")
        return _cut_at_stop(answer, limits) if limits.stop else answer

    def tool_answer(
        self, prompt: Sequence[int], choice: int, limits: SamplingLimits, name: str, schema: Mapping[str, Any]
    ) -> Answer:
        """A call of function ``name`` with made-up arguments that follow its JSON schema."""
        seed = _seed(prompt, choice)
        source = random.Random(seed)
        arguments = json.dumps(self._value(schema or {"type": "object"}, source), ensure_ascii=False)
        head = f'<tool_call>\n{{"name": "{name}", "arguments": '
        text = f"{head}{arguments}}}\n</tool_call>"
        tokens = self._tokenizer.encode(text, add_special_tokens=False)
        ends = [self._tokenizer.decode(tokens[: index + 1]) for index in range(len(tokens))]
        # A character of several tokens decodes to replacement characters until it is whole.
        bounds = [0, *(len(end.rstrip("\ufffd")) for end in ends)]
        first, last = len(head), len(head) + len(arguments)
        pieces = [text[max(start, first) : max(min(end, last), first)] for start, end in pairwise(bounds)]
        tokens.append(self._tokenizer.eos_id)
        pieces.append("")
        cut = len(tokens) > limits.max_tokens
        kept = tuple(pieces[: limits.max_tokens])
        return Answer(
            tokens=tuple(tokens[: limits.max_tokens]),
            pieces=kept,
            finish_reason="length" if cut else "tool_calls",
            tool_call=ToolCall(f"chatcmpl-tool-{seed:032x}", name, "".join(kept)),
        )

    def _value(self, schema: Mapping[str, Any], source: random.Random) -> Any:
        """A value that follows ``schema`` as far as types, enumerations and properties go."""
        if schema.get("enum"):
            return source.choice(list(schema["enum"]))
        kind = schema.get("type", "object" if "properties" in schema else "string")
        if isinstance(kind, list):
            kind = next((entry for entry in kind if entry != "null"), "null")
        match kind:
            case "object":
                properties = schema.get("properties") or {}
                return {name: self._value(each or {}, source) for name, each in properties.items()}
            case "array":
                return [self._value(schema.get("items") or {}, source)]
            case "integer":
                return source.randrange(1, 100)
            case "number":
                return source.randrange(1, 1000) / 10
            case "boolean":
                return source.random() < 0.5
            case "null":
                return None
        return self._text[source.choice(self._words)].strip()


def _seed(prompt: Sequence[int], choice: int) -> int:
    digest = hashlib.blake2b(array("I", prompt).tobytes(), digest_size=16, salt=choice.to_bytes(4, "big"))
    return int.from_bytes(digest.digest(), "big")


def _cut_at_stop(answer: Answer, limits: SamplingLimits) -> Answer:
    """End the answer with the token that completes a stop string; the string and what follows is left out."""
    text = ""
    for index, piece in enumerate(answer.pieces):
        text += piece
        if index + 1 <= limits.min_tokens:
            continue
        found = [(text.find(stop), stop) for stop in limits.stop if stop in text]
        if not found:
            continue
        end, stop = min(found)
        pieces, start = [], 0
        for kept in answer.pieces[: index + 1]:
            pieces.append(kept[: max(end - start, 0)])
            start += len(kept)
        return Answer(answer.tokens[: index + 1], tuple(pieces), "stop", stop)
    return answer
