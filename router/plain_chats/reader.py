"""From the bytes of a plain chat to its tokens, without an object for anything in between."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import msgspec
import numpy as np
import orjson
from numpy.typing import NDArray

from conductor.placement import Hashes, Tokens
from router.inference import Body, Endpoint, InferenceRequest
from router.plain_chats import kernels as k
from router.plain_chats import scanning as s
from router.plain_chats.known_chats import LONG_BYTES, KnownChat, KnownChats
from router.plain_chats.layout import Layout
from router.plain_chats.prompts import PlainPrompts
from router.plain_chats.workspace import Workspace
from router.plain_chats.writing import CHARACTER_CUTS, ENDS, MARKS, NO_CUT, TOKEN_CUTS
from router.word_tokens import MOST_PASSES
from router.word_tokens.kernels import DONE, UNSEEN_CHARACTER

MAX_BYTES = 64 * 1024 * 1024
AT_ONCE_BYTES = 160 * 1024  # of new text; more of it would keep other requests waiting
_MOST_BODY_BYTES = 1 << 20


class PlainChat(msgspec.Struct, frozen=True, gc=False):
    """What is read of a body. ``tokens`` is None where :meth:`PlainChats.tokenize` has to be asked for them.

    ``known_hashes`` are as those of the `PlacementRequest`; what is added to them the chat's next turn begins with.
    """

    request: InferenceRequest
    tokens: Tokens | None
    known_hashes: dict[int, Hashes]


# Whether a body is a plain chat, its tokens unless there are too many, and their known hashes; of its answer,
# whether it is to be streamed, and the most tokens, -1 where the body does not say.
_Found = tuple[bool, Tokens | None, dict[int, Hashes], bool, int]
_NOT_PLAIN: _Found = (False, None, {}, False, -1)


class _Reading(NamedTuple):
    """A long body, of which the first ``common`` messages are those of a known one."""

    body: Body
    data: NDArray[np.uint8]
    layout: Layout
    roles: bytes
    known: KnownChat | None
    common: int
    workspace: Workspace


class PlainChats:
    """Reads chats whose messages are a role and a text each. Thread-safe.

    ``prompts_of`` knows the tokenizers of models; the bodies and tokens of long chats take ``max_bytes`` at most.
    """

    def __init__(
        self, prompts_of: Callable[[str], PlainPrompts | None], *, max_bytes: int = MAX_BYTES
    ) -> None:
        self._prompts_of = prompts_of
        self._known = KnownChats(max_bytes)
        self._workspaces: list[Workspace] = []
        self._read_short, self._read_long, self._mark, _ = k.entry_points()

    def read(self, body: Body, most_new: int = AT_ONCE_BYTES) -> PlainChat | None:
        """None where it is no plain chat, or none that is tokenized here. What is new in it is tokenized if it is
        no more than ``most_new`` bytes.
        """
        try:
            workspace = self._workspaces.pop()
        except IndexError:
            workspace = Workspace()
        if len(body) < LONG_BYTES:
            with workspace.lock:
                outcome, count, stream, limit = self._read_short(body, workspace.address, k.SCAN)
            is_plain = outcome == DONE or (count := self._count(body, workspace, outcome, count)) is not None
            tokens = workspace.tokens[:count].copy() if is_plain else None
            hashes: dict[int, Hashes] = {}
        else:
            is_plain, tokens, hashes, stream, limit = self._long_chat(body, workspace, most_new)
        chat = None
        if is_plain:
            most = None if limit < 0 else limit
            request = InferenceRequest(Endpoint.CHAT, body, None, workspace.model, stream, most, None)
            chat = PlainChat(request, tokens, hashes)
        self._workspaces.append(workspace)
        return chat

    def tokenize(self, body: Body) -> Tokens | None:
        """Of a plain chat, however long it is; None where the library has to be asked."""
        found = self.read(body, _MOST_BODY_BYTES)
        return None if found is None else found.tokens

    def _count(self, body: Body, workspace: Workspace, outcome: int, number: int) -> int | None:
        """How many tokens a short chat has that the kernel was not through with."""
        if outcome == k.WANTS_LAYOUT:
            layout = self._layout(body, workspace, workspace.roles[:number].tobytes())
            if layout is None or not _holds(layout, body, workspace.messages, 0):
                return None
            workspace.remember(layout)
        read = partial(self._read_short, body, workspace.address)
        return _settled(read, workspace, outcome, number)

    def _long_chat(self, body: Body, workspace: Workspace, most_new: int) -> _Found:
        if len(body) > _MOST_BODY_BYTES:
            return _NOT_PLAIN
        data = np.frombuffer(body, np.uint8)
        known, common = self._known.find(body, data)
        found = self._read_behind(body, data, known, common, workspace, most_new)
        if found is _NOT_PLAIN and known is not None:
            found = self._read_behind(body, data, None, 0, workspace, most_new)
        return found

    def _read_behind(
        self,
        body: Body,
        data: NDArray[np.uint8],
        known: KnownChat | None,
        common: int,
        workspace: Workspace,
        most_new: int,
    ) -> _Found:
        behind, roles = 0, b""
        if known is not None:
            behind, roles = known.marks.item(ENDS, common - 1), known.roles[:common]
            workspace.facts[:] = known.facts
        read = partial(self._read_long, body, workspace.address, behind, common)
        outcome, number, stream, limit = read(k.SCAN)
        if outcome != k.WANTS_LAYOUT:
            return _NOT_PLAIN
        roles += workspace.roles[:number].tobytes()
        layout = self._layout(body, workspace, roles)
        if layout is None:
            return _NOT_PLAIN
        if known is not None:
            if known.prompts is not workspace.prompts:
                return _NOT_PLAIN
            shared = layout.shared_with(known.layout, common) if layout.in_turn else 0
            if not shared or known.marks.item(TOKEN_CUTS, shared - 1) == NO_CUT:
                return _NOT_PLAIN
            if shared < common:
                return self._read_behind(body, data, known, shared, workspace, most_new)
        tokens: Tokens | None = None
        hashes: dict[int, Hashes] = {}
        if len(body) - behind <= most_new:
            if not _holds(layout, body, workspace.messages, common):
                return _NOT_PLAIN
            count = _settled(read, workspace, outcome, number)
            if count is None:
                return _NOT_PLAIN
            reading = _Reading(body, data, layout, roles, known, common, workspace)
            tokens, hashes = self._kept(reading, count)
        return True, tokens, hashes, stream, limit

    def _layout(self, body: Body, workspace: Workspace, roles: bytes) -> Layout | None:
        """What is written around contents of messages with these roles; None where the library has to be asked.

        Puts it, and whose it is, where the kernels find it.
        """
        facts = workspace.facts
        model = str(body[facts.item(s.MODEL_BEGIN) : facts.item(s.MODEL_END)], "utf-8")
        prompts = self._prompts_of(model)
        layout = prompts.layout(roles) if prompts is not None and 0 < len(roles) <= k.MOST_MESSAGES else None
        # Some templates write contents repeatedly.
        if prompts is None or layout is None or layout.contents.size > k.MOST_MESSAGES:
            return None
        workspace.take(model, prompts)
        workspace.work[k.LAYOUT_AT] = layout.address
        return layout

    def _kept(self, reading: _Reading, count: int) -> tuple[Tokens, dict[int, Hashes]]:
        """The tokens and their known hashes; and remember what a next turn begins with."""
        body, data, layout, roles, known, common, workspace = reading
        prompts = workspace.prompts
        assert prompts is not None
        new = workspace.tokens[:count]
        if known is None:
            tokens, hashes = new.copy(), {}
        else:
            known_tokens = known.marks.item(TOKEN_CUTS, common - 1)
            tokens = np.concatenate((known.tokens[:known_tokens], new))
            hashes = known.hashes_of_first(known_tokens)
            prompts.known_characters += known.marks.item(CHARACTER_CUTS, common - 1)
        if not layout.in_turn:
            return tokens, hashes
        marks = np.empty((MARKS, len(roles)), np.int64)
        self._mark(
            marks if known is None else known.marks,
            common,
            workspace.messages,
            layout.cuts,
            layout.cut_characters,
            workspace.placed,
            workspace.places[: 2 * k.PLACES_A_MESSAGE * (layout.contents.size - common + 1)],
            marks,
        )
        facts = workspace.facts_before.copy()
        self._known.keep(KnownChat(body, data, prompts, layout, facts, roles, marks, tokens, hashes))
        return tokens, hashes


def _settled(
    read: Callable[[int], tuple[int, int, bool, int]], workspace: Workspace, outcome: int, number: int
) -> int | None:
    """How many tokens there are, when a kernel has got what it wants; None where the library has to be asked, or
    the template might write something else.

    The layout it may want is in its place by now.
    """
    has_room = False
    for _ in range(MOST_PASSES):
        stage = k.WRITE
        if outcome == DONE:
            return number
        if outcome == k.WANTS_ROOM and not has_room:  # else one of the contents is written again and again
            workspace.make_room(max(number, len(workspace.text)))
            has_room = True
        elif outcome in (k.UNSURE, UNSEEN_CHARACTER):
            assert workspace.prompts is not None
            stage, words = k.LOOK_UP, workspace.prompts.words
            if outcome == UNSEEN_CHARACTER:
                words.learn(number)
            elif not words.is_sure(workspace.written()):
                return None
        elif outcome != k.WANTS_LAYOUT:
            return None
        with workspace.lock:
            outcome, number, _, _ = read(stage)
    return None


def _holds(layout: Layout, body: Body, messages: NDArray[np.int64], common: int) -> bool:
    """Whether the new contents are as the template's answers take them to be."""

    def content(message: int) -> str:
        place = s.MESSAGE * (message - common)
        text: str = orjson.loads(body[messages.item(place + s.BEGIN) - 1 : messages.item(place + s.END) + 1])
        return text

    return not any(
        text in content(message) for message, text in layout.shape.absent if message >= common
    ) and all(content(message).strip() for message in layout.unwritten if message >= common)
