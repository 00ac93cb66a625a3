"""Compiled: where the parts of a JSON text end. What is found is valid; what may not be is `NOT_PLAIN`."""

# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from typing import Final

import numpy as np

from cache_index.kernel_set import inlined, outlined

# What stands at a place is no JSON that is understood here.
NOT_PLAIN: Final = -1
ESCAPED, BEYOND_ASCII = 1, 2  # bits of how a string is written

MOST_DIGITS: Final = 17  # of a number that nobody refuses
SPAN: Final = np.uint64(64)  # bytes that are looked at together
_DEEPEST: Final = 32
QUOTE, COMMA, COLON = 0x22, 0x2C, 0x3A
OPEN, CLOSE, OPEN_LIST, CLOSE_LIST = 0x7B, 0x7D, 0x5B, 0x5D
_BACKSLASH: Final = 0x5C
_ESCAPES: Final = tuple(b'"\\/bfnrt')


@inlined
def behind_space(body, at):
    while at < len(body) and (body[at] == 0x20 or body[at] == 0x0A or body[at] == 0x0D or body[at] == 0x09):
        at += 1
    return at


@inlined
def behind(body, at, sign):
    """Behind the sign and the white space around it, `NOT_PLAIN` where another one stands there."""
    at = behind_space(body, at)
    if at >= len(body) or body[at] != sign:
        return NOT_PLAIN
    return behind_space(body, at + 1)


@inlined
def _character_size(body, at):
    """Of a character beyond ASCII in UTF-8; 0 where the bytes are none."""
    lead, left = body[at], len(body) - at
    if left < 2 or body[at + 1] & 0xC0 != 0x80:
        return 0
    if 0xC2 <= lead <= 0xDF:
        return 2
    second = body[at + 1]
    if left < 3 or body[at + 2] & 0xC0 != 0x80:
        return 0
    if 0xE0 <= lead <= 0xEF:
        bad = (lead == 0xE0 and second < 0xA0) or (lead == 0xED and second >= 0xA0)
        return 0 if bad else 3
    if left < 4 or body[at + 3] & 0xC0 != 0x80:
        return 0
    bad = lead < 0xF0 or lead > 0xF4 or (lead == 0xF0 and second < 0x90) or (lead == 0xF4 and second >= 0x90)
    return 0 if bad else 4


@inlined
def _digit(sign):
    """Of a hexadecimal number; -1 where it is none."""
    if 0x30 <= sign <= 0x39:
        return np.int64(sign) - 0x30
    letter = sign | 0x20
    return np.int64(letter) - 0x57 if 0x61 <= letter <= 0x66 else np.int64(-1)


@inlined
def _unit(body, at):
    """The four digits of ``\\uXXXX``; -1 where they are none."""
    if at + 4 > len(body):
        return np.int64(-1)
    unit = np.int64(0)
    for place in range(at, at + 4):
        digit = _digit(body[place])
        if digit < 0:
            return np.int64(-1)
        unit = unit << 4 | digit
    return unit


@inlined
def _escape_end(body, at):
    """Behind the escape that begins at a backslash, and how it is written; `NOT_PLAIN` where it is none.

    Halves of a character stand together or not at all.
    """
    if at + 1 >= len(body):
        return NOT_PLAIN, 0
    sign = body[at + 1]
    if sign == ord("u"):
        unit = _unit(body, at + 2)
        if unit < 0 or 0xDC00 <= unit <= 0xDFFF:
            return NOT_PLAIN, 0
        if unit < 0xD800 or unit > 0xDFFF:
            return at + 6, ESCAPED if unit < 0x80 else ESCAPED | BEYOND_ASCII
        if at + 8 > len(body) or body[at + 6] != _BACKSLASH or body[at + 7] != ord("u"):
            return NOT_PLAIN, 0
        low = _unit(body, at + 8)
        return at + 12 if 0xDC00 <= low <= 0xDFFF else NOT_PLAIN, ESCAPED | BEYOND_ASCII
    return at + 2 if sign in _ESCAPES else NOT_PLAIN, ESCAPED


@outlined
def string_end(body, at):
    """At the quote that ends the string which began in front of ``at``, and how it is written."""
    written = 0
    while True:
        begin = np.uint64(at)
        while begin + SPAN <= len(body):
            special = np.uint8(0)
            for place in range(SPAN):
                sign = body[begin + place]
                # Control characters and what is beyond ASCII, quotes, backslashes.
                special |= (sign < 0x20) | (sign >= 0x80) | (sign == QUOTE) | (sign == _BACKSLASH)
            if special:
                break
            begin += SPAN
        at = np.int64(begin)
        if at >= len(body):
            return NOT_PLAIN, written
        stop = min(at + 2 * np.int64(SPAN), len(body))
        while at < stop:
            sign = body[at]
            if sign == QUOTE:
                return at, written
            if sign < 0x20:
                return NOT_PLAIN, written
            if sign == _BACKSLASH:
                at, how = _escape_end(body, at)
                if at == NOT_PLAIN:
                    return NOT_PLAIN, written
                written |= how
            elif sign >= 0x80:
                size = _character_size(body, at)
                if not size:
                    return NOT_PLAIN, written
                written |= BEYOND_ASCII
                at += size
            else:
                at += 1


@inlined
def digits_end(body, at):
    while at < len(body) and 0x30 <= body[at] <= 0x39:
        at += 1
    return at


@inlined
def _number_end(body, at):
    """`NOT_PLAIN` also where it is so long that who reads it might refuse it."""
    first = at + 1 if body[at] == ord("-") else at
    at = digits_end(body, first)
    if at == first or at - first > MOST_DIGITS or (body[first] == 0x30 and at > first + 1):
        return NOT_PLAIN
    if at < len(body) and body[at] == ord("."):
        begin = at + 1
        at = digits_end(body, begin)
        if at == begin or at - begin > MOST_DIGITS:
            return NOT_PLAIN
    if at < len(body) and body[at] | 0x20 == ord("e"):
        begin = at + 1
        if begin < len(body) and (body[begin] == ord("-") or body[begin] == ord("+")):
            begin += 1
        at = digits_end(body, begin)
        if at == begin or at - begin > 2:
            return NOT_PLAIN
    return at


@inlined
def _is_word(body, at, names, begin, end):
    if at + end - begin > len(body):
        return False
    same = 0
    while same < end - begin and body[at + same] == names[begin + same]:
        same += 1
    return same == end - begin


@inlined
def which(body, at, names, ends):
    """Which of the names stands here in quotes, and where it ends behind them; -1 where none does."""
    begin = 0
    if at < len(body) and body[at] == QUOTE:
        for each in range(len(ends)):
            end = ends[each]
            quote = at + 1 + end - begin
            if quote < len(body) and body[quote] == QUOTE and _is_word(body, at + 1, names, begin, end):
                return each, quote + 1
            begin = end
    return -1, at


@inlined
def literal_end(body, at):
    """Of ``true``, ``false`` and ``null``; `NOT_PLAIN` where it is none of them."""
    left = len(body) - at
    if left >= 4 and body[at + 3] == ord("e") and body[at] == ord("t"):
        return at + 4 if body[at + 1] == ord("r") and body[at + 2] == ord("u") else NOT_PLAIN
    if left >= 4 and body[at + 3] == ord("l") and body[at] == ord("n"):
        return at + 4 if body[at + 1] == ord("u") and body[at + 2] == ord("l") else NOT_PLAIN
    if left >= 5 and body[at] == ord("f") and body[at + 1] == ord("a") and body[at + 2] == ord("l"):
        return at + 5 if body[at + 3] == ord("s") and body[at + 4] == ord("e") else NOT_PLAIN
    return NOT_PLAIN


@outlined
def value_end(body, at):
    """Behind any value; `NOT_PLAIN` where it is none."""
    closes = np.empty(_DEEPEST, np.uint8)
    depth = 0
    while True:
        # A value begins here.
        if at >= len(body):
            return NOT_PLAIN
        sign = body[at]
        if sign in (OPEN, OPEN_LIST):
            if depth == _DEEPEST:
                return NOT_PLAIN
            closes[depth] = sign + 2
            depth += 1
            at = behind_space(body, at + 1)
            if at < len(body) and body[at] == sign + 2:
                depth -= 1
                at += 1
            else:
                if sign == OPEN:
                    at = _name_end(body, at)
                    if at == NOT_PLAIN:
                        return NOT_PLAIN
                continue
        elif sign == QUOTE:
            at, _ = string_end(body, at + 1)
            if at == NOT_PLAIN:
                return NOT_PLAIN
            at += 1
        else:
            at = _number_end(body, at) if sign == ord("-") or 0x30 <= sign <= 0x39 else literal_end(body, at)
            if at == NOT_PLAIN:
                return NOT_PLAIN
        # Behind a value: lists and objects end, or go on.
        while depth:
            at = behind_space(body, at)
            if at >= len(body):
                return NOT_PLAIN
            if body[at] == closes[depth - 1]:
                depth -= 1
                at += 1
                continue
            if body[at] != COMMA:
                return NOT_PLAIN
            at = behind_space(body, at + 1)
            if closes[depth - 1] == CLOSE:
                at = _name_end(body, at)
                if at == NOT_PLAIN:
                    return NOT_PLAIN
            break
        if not depth:
            return at


@inlined
def _name_end(body, at):
    """At the value that a name stands in front of."""
    if at >= len(body) or body[at] != QUOTE:
        return NOT_PLAIN
    at, _ = string_end(body, at + 1)
    return NOT_PLAIN if at == NOT_PLAIN else behind(body, at + 1, COLON)
