"""Compiled: from a chat's body to its tokens in one call, as far as it goes without the libraries.

A kernel that cannot go on says what it wants, and is called again from that stage on. What it reads and writes, it
finds by the `WORK` words of a `Workspace`.
"""

# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import numpy as np
from numba import types
from numba.np.numpy_support import carray

from cache_index.kernel_set import KernelSet, entry_point, inlined, subroutine
from cache_index.kernels import machine_words
from cache_index.kernels.machine_words import bytes_at, ids_at, words_at
from router.plain_chats import json_ends, scanning, writing
from router.plain_chats.json_ends import NOT_PLAIN, SPAN
from router.plain_chats.scanning import (
    COUNT,
    FACTS,
    MAX_COMPLETION_TOKENS,
    MAX_TOKENS,
    MESSAGE,
    MODEL_BEGIN,
    MODEL_END,
    STREAM,
    scan,
)
from router.plain_chats.writing import (
    BLANK,
    CONTENTS,
    IN_TURN,
    IS_ASCII,
    LITERAL_BYTES,
    MESSAGES,
    NO_ROOM,
    PLACED,
    ROLES_AT,
    mark,
    write,
)
from router.word_tokens import cutting
from router.word_tokens import kernels as word_kernels
from router.word_tokens.kernels import DONE, LEFT_TO_LIBRARY, look_up

_KERNELS = KernelSet(
    Path(__file__),
    *(
        Path(str(each.__file__))
        for each in (json_ends, scanning, writing, cutting, word_kernels, machine_words)
    ),
)
compile_all = _KERNELS.compile_all

# What a kernel came back with, beside what looking words up does: it wants to know what is written around contents,
# wants more room for the text, or wants to know whether a text that is not ASCII is looked up as it is.
WANTS_LAYOUT, WANTS_ROOM, UNSURE = range(LEFT_TO_LIBRARY + 1, LEFT_TO_LIBRARY + 4)
# Where it goes on.
SCAN, WRITE, LOOK_UP = range(3)

MOST_MESSAGES: Final = 1_024  # of a chat, and contents of a layout: finding a new one takes long
MOST_GUESSED: Final = 32  # messages of chats whose layout is taken to be that of the last one with as many
PLACES_A_MESSAGE: Final = 4  # added tokens in a long chat's text; with more of them it is not kept

# Words of a workspace: where the model's name stands and how long it is, where the layout, the tables of words and
# the count of characters are, and each of its arrays; how large text and tokens are; what is written so far.
(
    MODEL_AT, MODEL_BYTES, LAYOUT_AT, TABLES_AT, CHARACTERS_AT,
    MESSAGES_AT, SCANNED_ROLES_AT, PLACED_AT, PLACES_AT, TEXT_AT, TOKENS_AT, ROOM,
    SIZE, CHARACTERS,
) = range(14)  # fmt: skip
FACTS_FIRST: Final = 16  # of the present chat, and what is said in front of its messages
FACTS_BEFORE: Final = FACTS_FIRST + FACTS
LAYOUTS: Final = FACTS_BEFORE + FACTS  # by the number of messages, 0 where none is known
WORK: Final = LAYOUTS + MOST_GUESSED

_INTEGER = types.int64
_BODY = types.Bytes(types.uint8, 1, "C", readonly=True)  # any buffer, which an array would have to be made of
_BYTES = types.Array(types.uint8, 1, "C", readonly=True)
_INTEGERS = types.Array(types.int64, 1, "C")
_MARKS = types.Array(types.int64, 2, "C")


@inlined
def _layout_of(body, work, facts, roles, count):
    """Where the layout of the last chat with as many messages is, 0 unless this one has its model and its roles."""
    begin, size = facts[MODEL_BEGIN], work[MODEL_BYTES]
    if count >= MOST_GUESSED or work[LAYOUTS + count] == 0 or facts[MODEL_END] - begin != size:
        return 0
    name = carray(bytes_at(work[MODEL_AT]), size)
    for place in range(size):
        if name[place] != body[begin + place]:
            return 0
    address = work[LAYOUTS + count]
    known = carray(bytes_at(words_at(address)[ROLES_AT]), count)
    for place in range(count):
        if known[place] != roles[place]:
            return 0
    return address


@inlined
def _scanned(body, work, known_end, is_long, facts):
    """How many messages are behind ``known_end``, `NOT_PLAIN` where the libraries have to be asked."""
    facts_before = work[FACTS_BEFORE : FACTS_BEFORE + FACTS]
    messages = carray(words_at(work[MESSAGES_AT]), MESSAGE * MOST_MESSAGES)
    roles = carray(bytes_at(work[SCANNED_ROLES_AT]), MOST_MESSAGES)
    count = scan(body, known_end, facts, facts_before, messages, roles)
    if facts[COUNT] == 0:
        return NOT_PLAIN
    work[LAYOUT_AT] = 0 if count == NOT_PLAIN or is_long else _layout_of(body, work, facts, roles, count)
    return count


@inlined
def _written(body, work, common):
    """`DONE`, or why the text cannot be looked up, and how much room it may need."""
    layout = words_at(work[LAYOUT_AT])
    messages = carray(words_at(work[MESSAGES_AT]), MESSAGE * MOST_MESSAGES)
    placed = carray(words_at(work[PLACED_AT]), PLACED * MOST_MESSAGES)
    text = carray(bytes_at(work[TEXT_AT]), work[ROOM])
    size, beyond_ascii, characters = write(body, messages, common, layout, text, placed)
    if size == NO_ROOM:
        times = layout[CONTENTS] // layout[MESSAGES] + 1  # that a content is written, by and large
        return WANTS_ROOM, layout[LITERAL_BYTES] + times * len(body)
    if size == BLANK:
        return LEFT_TO_LIBRARY, 0
    work[SIZE], work[CHARACTERS] = size, characters
    return UNSURE if beyond_ascii or not layout[IS_ASCII] else DONE, 0


@inlined
def _looked_up(work, common, keeps):
    layout = words_at(work[LAYOUT_AT])
    contents = layout[CONTENTS] - common
    places = carray(words_at(work[PLACES_AT]), 2 * PLACES_A_MESSAGE * (contents + 1) if keeps else 0)
    text = carray(bytes_at(work[TEXT_AT]), work[ROOM])
    tokens = carray(ids_at(work[TOKENS_AT]), work[ROOM])
    outcome, number = look_up(text, work[SIZE], words_at(work[TABLES_AT]), tokens, places)
    if outcome == DONE:
        words_at(work[CHARACTERS_AT])[0] += work[CHARACTERS]
    return outcome, number


@subroutine
def _read(body, address, known_end, common, stage, is_long):
    body = np.frombuffer(body, np.uint8)
    work = carray(words_at(address), WORK)
    facts = work[FACTS_FIRST : FACTS_FIRST + FACTS]
    outcome, number = DONE, 0
    if stage == SCAN:
        number = _scanned(body, work, known_end, is_long, facts)
        if number == NOT_PLAIN:
            return LEFT_TO_LIBRARY, 0, False, -1
        if work[LAYOUT_AT] == 0:
            outcome = WANTS_LAYOUT
    if outcome == DONE and stage <= WRITE:
        outcome, number = _written(body, work, common)
    if outcome == DONE:
        keeps = is_long and words_at(work[LAYOUT_AT])[IN_TURN] != 0
        outcome, number = _looked_up(work, common, keeps)
    limit = facts[MAX_COMPLETION_TOKENS] if facts[MAX_COMPLETION_TOKENS] >= 0 else facts[MAX_TOKENS]
    return outcome, number, facts[STREAM] == 1, limit


@_KERNELS.kernel(_BODY, _INTEGER, _INTEGER, nogil=False)
def _read_short(body, address, stage):
    """The tokens of a chat, from this stage on. Keeps the GIL: waiting for it would take longer.

    Returns what it came back with; how many messages were scanned where a layout is wanted, how many bytes where
    room is, the character that is unseen, or how many tokens there are; whether the answer is to be streamed; and
    the most tokens that it may have, -1 where the body does not say.
    """
    return _read(body, address, 0, 0, stage, False)


@_KERNELS.kernel(_BODY, _INTEGER, _INTEGER, _INTEGER, _INTEGER)
def _read_long(body, address, known_end, common, stage):
    """Of what stands behind ``common`` messages, which end at ``known_end``; see `scan`.

    Notes where added tokens are, and takes no layout for granted.
    """
    return _read(body, address, known_end, common, stage, True)


@_KERNELS.kernel(_MARKS, _INTEGER, _INTEGERS, _INTEGERS, _INTEGERS, _INTEGERS, _INTEGERS, _MARKS)
def _mark(known_marks, known, messages, cuts, cut_characters, placed, places, marks):
    mark(known_marks, known, messages, cuts, cut_characters, placed, places, marks)


@_KERNELS.kernel(_BYTES, _BYTES)
def _same_bytes(body, other):
    """How many bytes two bodies begin with that are the same."""
    size = np.uint64(min(len(body), len(other)))
    at = np.uint64(0)
    while at + SPAN <= size:  # unsigned: indices that cannot be negative are vectorized
        differ = np.uint8(0)
        for place in range(SPAN):
            differ |= body[at + place] ^ other[at + place]
        if differ:
            break
        at += SPAN
    while at < size and body[at] == other[at]:
        at += np.uint64(1)
    return np.int64(at)


@lru_cache(maxsize=1)
def entry_points() -> tuple[Callable[..., Any], ...]:
    """Of ``read_short``, ``read_long``, ``mark`` and ``same_bytes``."""
    if not _same_bytes.signatures:
        compile_all()
    return tuple(map(entry_point, (_read_short, _read_long, _mark, _same_bytes)))
