"""From the bytes of a plain chat to its tokens, without an object for anything in between."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import orjson
from numpy.typing import NDArray

from conductor.placement import Tokens
from router.inference import Endpoint, InferenceRequest
from router.plain_chats import scanning as s
from router.plain_chats.json_ends import NOT_PLAIN
from router.plain_chats.known_chats import LONG_BYTES, KnownChat, KnownChats
from router.plain_chats.layout import Layout
from router.plain_chats.prompts import PlainPrompts
from router.plain_chats.writing import (
    BLANK,
    CHARACTER_CUTS,
    ENDS,
    MARKS,
    NO_CUT,
    NO_ROOM,
    PLACED,
    TOKEN_CUTS,
    entry_points,
)

MAX_BYTES = 64 * 1024 * 1024
AT_ONCE_BYTES = 160 * 1024  # of new text; more of it would keep other requests waiting
_MOST_MESSAGES = 1_024  # of a chat, and contents of a layout; finding a new one takes longer than reading
_MOST_BODY_BYTES = 1 << 20
_PLACES_A_MESSAGE = 4  # added tokens in a long chat's text; with more of them it is not kept
_SMALL_BYTES = 16_384
_NOWHERE = np.empty(0, np.int64)


class _Scratch:
    """What the kernels write, kept from one chat to the next: fresh memory would cost more than they do."""

    def __init__(self) -> None:
        self.facts = np.empty(s.FACTS, np.int64)
        self.facts_before = np.empty(s.FACTS, np.int64)
        self.messages = np.empty(s.MESSAGE * _MOST_MESSAGES, np.int64)
        self.roles = np.empty(_MOST_MESSAGES, np.uint8)
        self.placed = np.empty(PLACED * _MOST_MESSAGES, np.int64)
        self.places = np.empty(2 * _PLACES_A_MESSAGE * _MOST_MESSAGES, np.int64)
        self.make_room(_SMALL_BYTES)

    def make_room(self, size: int) -> None:
        """For a text of so many bytes."""
        self.text = np.empty(size, np.uint8)
        self.tokens = np.empty(size, np.uint32)


class PlainChat(NamedTuple):
    """What is read of a body. ``tokens`` is None where :meth:`PlainChats.tokenize` has to be asked for them."""

    request: InferenceRequest
    tokens: Tokens | None


class _Reading(NamedTuple):
    """A body that was found to be a plain chat, of which the first ``common`` messages are those of a known one."""

    body: bytes | bytearray
    data: NDArray[np.uint8]
    prompts: PlainPrompts
    layout: Layout
    roles: bytes
    known: KnownChat | None
    common: int
    scratch: _Scratch


class PlainChats:
    """Reads chats whose messages are a role and a text each. Thread-safe.

    ``prompts_of`` knows the tokenizers of models; the bodies and tokens of long chats take ``max_bytes`` at most.
    """

    def __init__(
        self, prompts_of: Callable[[str], PlainPrompts | None], *, max_bytes: int = MAX_BYTES
    ) -> None:
        self._prompts_of = prompts_of
        self._known = KnownChats(max_bytes)
        self._scratches: list[_Scratch] = []
        self._scan = s.entry_points()[0]
        self._write, self._mark = entry_points()

    def read(self, body: bytes | bytearray) -> PlainChat | None:
        """None where it is no plain chat, or none that is tokenized here. What is new in it is tokenized if it is
        no more than `AT_ONCE_BYTES`.
        """
        return self._read(body, AT_ONCE_BYTES)

    def tokenize(self, body: bytes | bytearray) -> Tokens | None:
        """Of a plain chat, however long it is; None where the library has to be asked."""
        found = self._read(body, _MOST_BODY_BYTES)
        return None if found is None else found.tokens

    def _read(self, body: bytes | bytearray, most_new: int) -> PlainChat | None:
        if not 0 < len(body) <= _MOST_BODY_BYTES:
            return None
        scratch = self._scratches.pop() if self._scratches else _Scratch()
        try:
            data = np.frombuffer(body, np.uint8)
            known, common = None, 0
            if len(body) >= LONG_BYTES:
                known, common = self._known.find(body, data)
            chat = self._read_behind(body, data, known, common, scratch, most_new)
            if chat is None and known is not None:
                chat = self._read_behind(body, data, None, 0, scratch, most_new)
            return chat
        finally:
            self._scratches.append(scratch)

    def _read_behind(
        self,
        body: bytes | bytearray,
        data: NDArray[np.uint8],
        known: KnownChat | None,
        common: int,
        scratch: _Scratch,
        most_new: int,
    ) -> PlainChat | None:
        facts = scratch.facts
        behind, roles = 0, b""
        if known is not None:
            behind, roles = known.marks.item(ENDS, common - 1), known.roles[:common]
            facts[:] = known.facts
        count = self._scan(data, behind, facts, scratch.facts_before, scratch.messages, scratch.roles)
        if count == NOT_PLAIN:
            return None
        model_begin, model_end, stream, max_tokens, max_completion_tokens, choices, _ = facts.tolist()
        model = body[model_begin:model_end].decode()
        prompts = self._prompts_of(model)
        if prompts is None or choices == 0 or (known is not None and known.prompts is not prompts):
            return None
        roles += scratch.roles[:count].tobytes()
        layout = prompts.layout(roles) if 0 < len(roles) <= _MOST_MESSAGES else None
        # Some templates write contents repeatedly.
        if layout is None or layout.contents.size > _MOST_MESSAGES:
            return None
        if known is not None:
            shared = layout.shared_with(known.layout, common) if layout.in_turn else 0
            if not shared or known.marks.item(TOKEN_CUTS, shared - 1) == NO_CUT:
                return None
            if shared < common:
                return self._read_behind(body, data, known, shared, scratch, most_new)
        tokens = None
        if len(body) - behind <= most_new:
            tokens = self._tokens(_Reading(body, data, prompts, layout, roles, known, common, scratch))
            if tokens is None:
                return None
        limit = max_completion_tokens if max_completion_tokens >= 0 else max_tokens
        request = InferenceRequest(
            Endpoint.CHAT, body, None, model, stream == 1, None if limit < 0 else limit, None
        )
        return PlainChat(request, tokens)

    def _tokens(self, reading: _Reading) -> Tokens | None:
        """None where the library has to be asked, or the template might write something else."""
        body, data, prompts, layout, roles, known, common, scratch = reading
        begin = layout.cuts.item(common) if common else 0
        arguments = (data, scratch.messages, common, layout.contents, layout.how, layout.literals,
                     layout.literal_ends, begin)  # fmt: skip
        size, beyond_ascii, characters = self._write(*arguments, scratch.text, scratch.placed)
        if size == NO_ROOM:
            times = layout.contents.size // len(roles) + 1  # that a content is written, by and large
            scratch.make_room(max(layout.room + times * len(data), len(scratch.text)))
            size, beyond_ascii, characters = self._write(*arguments, scratch.text, scratch.placed)
            if size == NO_ROOM:  # where one of them is written again and again
                return None
        text = scratch.text
        if size == BLANK:
            return None
        words = prompts.words
        if (beyond_ascii or not layout.is_ascii) and not words.is_sure(text[:size].tobytes().decode()):
            return None
        contents = layout.contents.size - common
        absent = layout.shape.absent
        if (absent or layout.unwritten) and not _holds(
            absent, layout.unwritten, body, scratch.messages, common
        ):
            return None
        is_long = data.size >= LONG_BYTES and layout.in_turn
        places = scratch.places[: 2 * _PLACES_A_MESSAGE * (contents + 1)] if is_long else _NOWHERE
        count = words.write_tokens(text, size, scratch.tokens, places)
        if count is None:
            return None
        prompts.new_characters += characters
        if known is not None:
            prompts.known_characters += known.marks.item(CHARACTER_CUTS, common - 1)
        new = scratch.tokens[:count]
        tokens = new.copy() if known is None else np.concatenate((_front(known, common), new))
        if is_long:
            self._keep(reading, tokens, places)
        return tokens

    def _keep(self, reading: _Reading, tokens: Tokens, places: NDArray[np.int64]) -> None:
        """Remember what a next turn begins with."""
        body, data, prompts, layout, roles, known, common, scratch = reading
        marks = np.empty((MARKS, len(roles)), np.int64)
        known_marks = marks if known is None else known.marks
        self._mark(
            known_marks,
            common,
            scratch.messages,
            layout.cuts,
            layout.cut_characters,
            scratch.placed,
            places,
            marks,
        )
        facts = scratch.facts_before.copy()
        self._known.keep(KnownChat(body, data, prompts, layout, facts, roles, marks, tokens))


def _front(known: KnownChat, common: int) -> Tokens:
    return known.tokens[: known.marks.item(TOKEN_CUTS, common - 1)]


def _holds(
    absent: tuple[tuple[int, str], ...],
    not_blank: tuple[int, ...],
    body: bytes | bytearray,
    messages: NDArray[np.int64],
    common: int,
) -> bool:
    """Whether the new contents are as the template's answers take them to be."""

    def content(message: int) -> str:
        place = s.MESSAGE * (message - common)
        text: str = orjson.loads(body[messages.item(place + s.BEGIN) - 1 : messages.item(place + s.END) + 1])
        return text

    return not any(text in content(message) for message, text in absent if message >= common) and all(
        content(message).strip() for message in not_blank if message >= common
    )
