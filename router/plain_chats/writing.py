"""Compiled: the text of a plain chat's prompt, of its contents and what the template writes between them."""

# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from typing import Final

import numpy as np
from numba.np.numpy_support import carray

from cache_index.kernel_set import inlined, outlined
from cache_index.kernels.machine_words import bytes_at, words_at
from router.plain_chats.json_ends import BEYOND_ASCII, ESCAPED
from router.plain_chats.scanning import BEGIN, END, MESSAGE, MESSAGE_END, WRITTEN
from router.unknown_text import LEFT, RIGHT

# A layout as it is read here: how many it has of messages, contents and bytes of literals, where its arrays stand,
# and what it says of itself.
(
    MESSAGES, CONTENTS, LITERAL_BYTES,
    ROLES_AT, CONTENTS_AT, HOW_AT, LITERALS_AT, LITERAL_ENDS_AT, CUTS_AT,
    IN_TURN, IS_ASCII, LAYOUT,
) = range(12)  # fmt: skip

# Of each content in the text: where it ends, and how many characters end there.
TEXT_END, CHARACTERS, PLACED = range(3)
# Of each message: where it ends in the body, and how many tokens and characters of the prompt stand in front of the
# separator behind it, `NO_CUT` where there is none.
ENDS, TOKEN_CUTS, CHARACTER_CUTS, MARKS = range(4)
NO_CUT: Final = -1

NO_ROOM: Final = -1
BLANK: Final = -2
NOT_BLANK: Final = 4  # beside LEFT and RIGHT

_BACKSLASH = 0x5C


@inlined
def _copied(source, begin, end, text, at):
    size = end - begin
    text[at : at + size] = source[begin:end]
    return at + size


@inlined
def _digit(sign):
    return sign - 0x30 if sign <= 0x39 else (sign | 0x20) - 0x57


@inlined
def _unit(body, at):
    unit = 0
    for place in range(at, at + 4):
        unit = unit << 4 | _digit(int(body[place]))
    return unit


@inlined
def _encoded(character, text, at):
    """As UTF-8; returns where it ends."""
    if character < 0x80:
        text[at] = character
        return at + 1
    if character < 0x800:
        text[at] = 0xC0 | character >> 6
        text[at + 1] = 0x80 | character & 0x3F
        return at + 2
    if character < 0x10000:
        text[at] = 0xE0 | character >> 12
        text[at + 1] = 0x80 | character >> 6 & 0x3F
        text[at + 2] = 0x80 | character & 0x3F
        return at + 3
    text[at] = 0xF0 | character >> 18
    text[at + 1] = 0x80 | character >> 12 & 0x3F
    text[at + 2] = 0x80 | character >> 6 & 0x3F
    text[at + 3] = 0x80 | character & 0x3F
    return at + 4


@outlined
def _unescaped(body, begin, end, text, at):
    """Of a string that was found to be valid; returns where it ends."""
    while begin < end:
        sign = body[begin]
        if sign != _BACKSLASH:
            text[at] = sign
            at += 1
            begin += 1
            continue
        sign = body[begin + 1]
        if sign == ord("u"):
            character = _unit(body, begin + 2)
            begin += 6
            if 0xD800 <= character < 0xDC00:
                character = 0x10000 + ((character - 0xD800) << 10) + (_unit(body, begin + 2) - 0xDC00)
                begin += 6
            at = _encoded(character, text, at)
            continue
        if sign == ord("n"):
            sign = 0x0A
        elif sign == ord("t"):
            sign = 0x09
        elif sign == ord("r"):
            sign = 0x0D
        elif sign == ord("b"):
            sign = 0x08
        elif sign == ord("f"):
            sign = 0x0C
        text[at] = sign
        at += 1
        begin += 2
    return at


@inlined
def _is_space(character):
    """As Python's ``str.isspace``."""
    if character < 0x80:
        return character == 0x20 or 0x09 <= character <= 0x0D or 0x1C <= character <= 0x1F
    if character < 0x2000:
        return character == 0x85 or character == 0xA0 or character == 0x1680
    return (
        character <= 0x200A
        or 0x2028 <= character <= 0x2029
        or character == 0x202F
        or character == 0x205F
        or character == 0x3000
    )


@inlined
def _character(text, at, end):
    """The character that begins here, of three bytes at most (white space has no more), and where it ends."""
    lead = int(text[at])
    if lead < 0x80:
        return lead, at + 1
    if lead < 0xE0:
        return (lead & 0x1F) << 6 | int(text[at + 1]) & 0x3F, at + 2
    if lead < 0xF0:
        return (lead & 0x0F) << 12 | (int(text[at + 1]) & 0x3F) << 6 | int(text[at + 2]) & 0x3F, at + 3
    return 0x10000, end


@outlined
def _stripped(text, begin, end, sides):
    """Move what is written from ``begin`` on to there without white space at these sides; returns where it ends."""
    first = begin
    while sides & LEFT and first < end:
        character, behind = _character(text, first, end)
        if not _is_space(character):
            break
        first = behind
    while sides & RIGHT and end > first:
        last = end - 1
        while text[last] & 0xC0 == 0x80:
            last -= 1
        character, _ = _character(text, last, end)
        if not _is_space(character):
            break
        end = last
    if first > begin:
        for place in range(first, end):
            text[begin + place - first] = text[place]
    return begin + end - first


@outlined
def _is_blank(text, begin, end):
    while begin < end:
        character, begin = _character(text, begin, end)
        if not _is_space(character):
            return False
    return True


@inlined
def _characters(text, begin, end):
    count = 0
    for place in range(np.uint64(begin), np.uint64(end)):
        count += text[place] & 0xC0 != 0x80
    return count


@outlined
def write(body, messages, known, layout, text, placed):
    """Write what stands behind the first ``known`` contents, from the separator in front of it on.

    ``messages`` are those behind the known ones, as `scan` put them; ``layout`` points to a layout. Its contents
    are which message's content stands behind each literal, and how: at which sides without white space, and whether
    it must be more than that. Returns the text's size, `NO_ROOM` where ``text`` is too small, `BLANK` where one of
    the contents is; whether they have anything that is not ASCII, and how many characters the text has.
    """
    contents = carray(words_at(layout[CONTENTS_AT]), layout[CONTENTS])
    how = carray(words_at(layout[HOW_AT]), layout[CONTENTS])
    literals = carray(bytes_at(layout[LITERALS_AT]), layout[LITERAL_BYTES])
    literal_ends = carray(words_at(layout[LITERAL_ENDS_AT]), layout[CONTENTS] + 1)
    cuts = carray(words_at(layout[CUTS_AT]), layout[CONTENTS] + 1)
    begin = cuts[known] if known else 0
    start = literal_ends[known - 1] if known else 0
    at, beyond, characters = 0, 0, 0
    for each in range(known, len(contents) + 1):
        end = literal_ends[each]
        if at + end - start - begin > len(text):
            return NO_ROOM, 0, 0
        before = at
        at = _copied(literals, start + begin, end, text, at)
        characters += _characters(text, before, at)
        start, begin = end, 0
        if each < len(contents):
            message = MESSAGE * (contents[each] - known)
            first, last, written = (
                messages[message + BEGIN],
                messages[message + END],
                messages[message + WRITTEN],
            )
            if at + last - first > len(text):
                return NO_ROOM, 0, 0
            place = PLACED * (each - known)
            before = at
            if written & ESCAPED:
                stop = _unescaped(body, first, last, text, at)
            else:
                stop = _copied(body, first, last, text, at)
            if how[each] & NOT_BLANK and _is_blank(text, at, stop):
                return BLANK, 0, 0
            at = _stripped(text, at, stop, how[each]) if how[each] & (LEFT | RIGHT) else stop
            beyond |= written & BEYOND_ASCII
            placed[place + TEXT_END] = at
            characters += _characters(text, before, at)
            placed[place + CHARACTERS] = characters
    return at, beyond, characters


@outlined
def mark(known_marks, known, messages, cuts, cut_characters, placed, places, marks):
    """Put the marks of all messages into ``marks``, the first ``known`` of them from ``known_marks``.

    ``cuts`` are where in each literal its first separator begins, -1 where none does, and ``cut_characters`` the
    same in characters; ``places`` where added tokens begin in the text that `write` wrote, in turn with how many
    tokens stand in front of each.
    """
    tokens, characters = 0, 0
    for each in range(known):
        for kind in range(MARKS):
            marks[kind, each] = known_marks[kind, each]
        tokens, characters = marks[TOKEN_CUTS, each], marks[CHARACTER_CUTS, each]
    at = 0
    for each in range(known, marks.shape[1]):
        new = each - known
        cut = placed[PLACED * new + TEXT_END] + cuts[each + 1]
        while at < len(places) and places[at] < cut:
            at += 2
        found = cuts[each + 1] >= 0 and at < len(places) and places[at] == cut
        marks[ENDS, each] = messages[MESSAGE * new + MESSAGE_END]
        marks[TOKEN_CUTS, each] = tokens + places[at + 1] if found else NO_CUT
        marks[CHARACTER_CUTS, each] = (
            characters + placed[PLACED * new + CHARACTERS] + cut_characters[each + 1]
        )
