"""Compiled: the JSON of a plain chat, read without making objects of it.

Understood is one object with the fields of `FIELDS`, each at most once, whose ``messages`` are objects of exactly a
role and a text, in this order. Whatever else may be right or wrong with a body is for somebody else to say:
`scan` only tells that it is not plain. All of what it calls plain is valid JSON.
"""

# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import numpy as np
from numba import types

from cache_index.kernel_set import KernelSet, entry_point, inlined, outlined

_KERNELS = KernelSet(Path(__file__))
compile_all = _KERNELS.compile_all

ROLES: Final = ("system", "user", "assistant")

# What is read of a request; -1 where it does not say. ``SEEN`` has a bit for each field of the body.
MODEL_BEGIN, MODEL_END, STREAM, MAX_TOKENS, MAX_COMPLETION_TOKENS, COUNT, SEEN, FACTS = range(8)
_NUMBERS: Final = {"max_tokens": MAX_TOKENS, "max_completion_tokens": MAX_COMPLETION_TOKENS, "n": COUNT}
# Fields that neither the prompt nor its placement depends on.
_OTHERS: Final = (
    *("stream_options", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "user"),
    *(
        "frequency_penalty",
        "presence_penalty",
        "repetition_penalty",
        "logprobs",
        "top_logprobs",
        "logit_bias",
    ),
    *("ignore_eos", "min_tokens", "response_format", "service_tier", "metadata", "skip_special_tokens"),
)
FIELDS: Final = ("model", "messages", "stream", *_NUMBERS, *_OTHERS)
_MODEL, _MESSAGES, _STREAM, _FIRST_NUMBER = range(4)
_FIRST_OTHER: Final = _FIRST_NUMBER + len(_NUMBERS)

# Of each message: where its content stands, how it is written, and where the message ends.
BEGIN, END, WRITTEN, MESSAGE_END, MESSAGE = range(5)
ESCAPED, BEYOND_ASCII = 1, 2  # bits of ``WRITTEN``

NOT_PLAIN: Final = -1
_MOST_DIGITS = 17
_DEEPEST = 32
_SPAN: Final = np.uint64(64)  # bytes that are looked at together

_INTEGER = types.int64
_BYTES = types.Array(types.uint8, 1, "C", readonly=True)
_OUT_BYTES = types.Array(types.uint8, 1, "C")
_OUT_INTEGERS = types.Array(types.int64, 1, "C")

_NAMES = np.frombuffer("".join(FIELDS).encode(), np.uint8)
_NAME_ENDS = np.cumsum([len(name) for name in FIELDS], dtype=np.int64)
_ROLE_NAMES = np.frombuffer("".join(ROLES).encode(), np.uint8)
_ROLE_ENDS = np.cumsum([len(role) for role in ROLES], dtype=np.int64)
_QUOTE, _BACKSLASH, _COMMA, _COLON = 0x22, 0x5C, 0x2C, 0x3A
_ESCAPES = tuple(b'"\\/bfnrt')
_OPEN, _CLOSE, _OPEN_LIST, _CLOSE_LIST = 0x7B, 0x7D, 0x5B, 0x5D


@inlined
def _behind_space(body, at):
    while at < len(body) and (body[at] == 0x20 or body[at] == 0x0A or body[at] == 0x0D or body[at] == 0x09):
        at += 1
    return at


@inlined
def _behind(body, at, sign):
    """Behind the sign and the white space around it, `NOT_PLAIN` where another one stands there."""
    at = _behind_space(body, at)
    if at >= len(body) or body[at] != sign:
        return NOT_PLAIN
    return _behind_space(body, at + 1)


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
def _string_end(body, at):
    """At the quote that ends the string which began in front of ``at``, and how it is written."""
    written = 0
    while True:
        begin = np.uint64(at)
        while begin + _SPAN <= len(body):
            special = np.uint8(0)
            for place in range(_SPAN):
                sign = body[begin + place]
                # Control characters and what is beyond ASCII, quotes, backslashes.
                special |= (sign < 0x20) | (sign >= 0x80) | (sign == _QUOTE) | (sign == _BACKSLASH)
            if special:
                break
            begin += _SPAN
        at = np.int64(begin)
        if at >= len(body):
            return NOT_PLAIN, written
        stop = min(at + 2 * np.int64(_SPAN), len(body))
        while at < stop:
            sign = body[at]
            if sign == _QUOTE:
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
def _digits_end(body, at):
    while at < len(body) and 0x30 <= body[at] <= 0x39:
        at += 1
    return at


@inlined
def _number_end(body, at):
    """`NOT_PLAIN` also where it is so long that who reads it might refuse it."""
    first = at + 1 if body[at] == ord("-") else at
    at = _digits_end(body, first)
    if at == first or at - first > _MOST_DIGITS or (body[first] == 0x30 and at > first + 1):
        return NOT_PLAIN
    if at < len(body) and body[at] == ord("."):
        begin = at + 1
        at = _digits_end(body, begin)
        if at == begin or at - begin > _MOST_DIGITS:
            return NOT_PLAIN
    if at < len(body) and body[at] | 0x20 == ord("e"):
        begin = at + 1
        if begin < len(body) and (body[begin] == ord("-") or body[begin] == ord("+")):
            begin += 1
        at = _digits_end(body, begin)
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
def _which(body, at, names, ends):
    """Which of the names stands here in quotes, and where it ends behind them; -1 where none does."""
    begin = 0
    if at < len(body) and body[at] == _QUOTE:
        for each in range(len(ends)):
            end = ends[each]
            quote = at + 1 + end - begin
            if quote < len(body) and body[quote] == _QUOTE and _is_word(body, at + 1, names, begin, end):
                return each, quote + 1
            begin = end
    return -1, at


@inlined
def _literal_end(body, at):
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
def _value_end(body, at):
    """Behind any value; `NOT_PLAIN` where it is none."""
    closes = np.empty(_DEEPEST, np.uint8)
    depth = 0
    while True:
        # A value begins here.
        if at >= len(body):
            return NOT_PLAIN
        sign = body[at]
        if sign in (_OPEN, _OPEN_LIST):
            if depth == _DEEPEST:
                return NOT_PLAIN
            closes[depth] = sign + 2
            depth += 1
            at = _behind_space(body, at + 1)
            if at < len(body) and body[at] == sign + 2:
                depth -= 1
                at += 1
            else:
                if sign == _OPEN:
                    at = _name_end(body, at)
                    if at == NOT_PLAIN:
                        return NOT_PLAIN
                continue
        elif sign == _QUOTE:
            at, _ = _string_end(body, at + 1)
            if at == NOT_PLAIN:
                return NOT_PLAIN
            at += 1
        else:
            at = _number_end(body, at) if sign == ord("-") or 0x30 <= sign <= 0x39 else _literal_end(body, at)
            if at == NOT_PLAIN:
                return NOT_PLAIN
        # Behind a value: lists and objects end, or go on.
        while depth:
            at = _behind_space(body, at)
            if at >= len(body):
                return NOT_PLAIN
            if body[at] == closes[depth - 1]:
                depth -= 1
                at += 1
                continue
            if body[at] != _COMMA:
                return NOT_PLAIN
            at = _behind_space(body, at + 1)
            if closes[depth - 1] == _CLOSE:
                at = _name_end(body, at)
                if at == NOT_PLAIN:
                    return NOT_PLAIN
            break
        if not depth:
            return at


@inlined
def _name_end(body, at):
    """At the value that a name stands in front of."""
    if at >= len(body) or body[at] != _QUOTE:
        return NOT_PLAIN
    at, _ = _string_end(body, at + 1)
    return NOT_PLAIN if at == NOT_PLAIN else _behind(body, at + 1, _COLON)


_MESSAGE_NAMES = np.frombuffer(b"rolecontent", np.uint8)
_MESSAGE_NAME_ENDS = np.array([4, 11], np.int64)


@inlined
def _message_end(body, at, messages, roles, count):
    """Behind the message that begins here, which is put behind ``count`` others."""
    at = _behind(body, at, _OPEN)
    if at == NOT_PLAIN:
        return NOT_PLAIN
    name, at = _which(body, at, _MESSAGE_NAMES, _MESSAGE_NAME_ENDS)
    if name != 0:
        return NOT_PLAIN
    at = _behind(body, at, _COLON)
    if at == NOT_PLAIN:
        return NOT_PLAIN
    role, at = _which(body, at, _ROLE_NAMES, _ROLE_ENDS)
    if role < 0:
        return NOT_PLAIN
    at = _behind(body, at, _COMMA)
    if at == NOT_PLAIN:
        return NOT_PLAIN
    name, at = _which(body, at, _MESSAGE_NAMES, _MESSAGE_NAME_ENDS)
    if name != 1:
        return NOT_PLAIN
    at = _behind(body, at, _COLON)
    if at == NOT_PLAIN or at >= len(body) or body[at] != _QUOTE:
        return NOT_PLAIN
    end, written = _string_end(body, at + 1)
    if end == NOT_PLAIN:
        return NOT_PLAIN
    first = MESSAGE * count
    roles[count] = role
    messages[first + BEGIN] = at + 1
    messages[first + END] = end
    messages[first + WRITTEN] = written
    at = _behind_space(body, end + 1)
    if at >= len(body) or body[at] != _CLOSE:
        return NOT_PLAIN
    messages[first + MESSAGE_END] = at + 1
    return at + 1


@inlined
def _fact_end(body, at, field, facts):
    """Behind the value of a field other than ``messages``."""
    if at >= len(body):
        return NOT_PLAIN
    if field == _MODEL:
        if body[at] != _QUOTE:
            return NOT_PLAIN
        end, written = _string_end(body, at + 1)
        if end == NOT_PLAIN or written or end == at + 1:
            return NOT_PLAIN
        facts[MODEL_BEGIN], facts[MODEL_END] = at + 1, end
        return end + 1
    if field == _STREAM:
        end = _literal_end(body, at)
        if end == NOT_PLAIN or body[at] == ord("n"):
            return NOT_PLAIN
        facts[STREAM] = body[at] == ord("t")
        return end
    if field >= _FIRST_OTHER:
        return _value_end(body, at)
    end = _digits_end(body, at)
    if end == at or end - at > _MOST_DIGITS or (body[at] == 0x30 and end > at + 1):
        return NOT_PLAIN
    if end < len(body) and (body[end] == ord(".") or body[end] | 0x20 == ord("e")):
        return NOT_PLAIN
    number = np.int64(0)
    for place in range(at, end):
        number = number * 10 + (np.int64(body[place]) - 0x30)
    facts[MAX_TOKENS + field - _FIRST_NUMBER] = number
    return end


@_KERNELS.kernel(_BYTES, _INTEGER, _OUT_INTEGERS, _OUT_INTEGERS, _OUT_INTEGERS, _OUT_BYTES)
def _scan(body, behind, facts, facts_before, messages, roles):
    """How many messages a plain chat has, `NOT_PLAIN` if it is none or they are too many for ``roles``.

    Where the body is known up to the end of a message, that is ``behind``, only the messages behind it are read,
    and ``facts`` are what is said in front of the messages; 0 where nothing is known. ``facts_before`` gets that.
    """
    count = 0
    if behind:
        at = behind
    else:
        facts[:] = -1
        facts[SEEN] = 0
        at = _behind(body, 0, _OPEN)
        if at == NOT_PLAIN:
            return NOT_PLAIN
    while True:
        if not behind:
            field, at = _which(body, at, _NAMES, _NAME_ENDS)
            if field < 0 or facts[SEEN] >> field & 1:
                return NOT_PLAIN
            facts[SEEN] |= 1 << field
            at = _behind(body, at, _COLON)
            if at == NOT_PLAIN:
                return NOT_PLAIN
            if field != _MESSAGES:
                at = _fact_end(body, at, field, facts)
                if at == NOT_PLAIN:
                    return NOT_PLAIN
        if behind or field == _MESSAGES:
            facts_before[:] = facts
            if not behind:
                at = _behind(body, at, _OPEN_LIST)
                if at == NOT_PLAIN:
                    return NOT_PLAIN
            more = not behind
            while True:
                if not more:
                    at = _behind_space(body, at)
                    if at >= len(body):
                        return NOT_PLAIN
                    if body[at] == _CLOSE_LIST:
                        at += 1
                        break
                    at = _behind(body, at, _COMMA)
                    if at == NOT_PLAIN:
                        return NOT_PLAIN
                if count == len(roles):
                    return NOT_PLAIN
                at = _message_end(body, at, messages, roles, count)
                if at == NOT_PLAIN:
                    return NOT_PLAIN
                count += 1
                more = False
            behind = 0
        at = _behind_space(body, at)
        if at >= len(body):
            return NOT_PLAIN
        if body[at] == _CLOSE:
            break
        at = _behind(body, at, _COMMA)
        if at == NOT_PLAIN:
            return NOT_PLAIN
    both = 1 << _MODEL | 1 << _MESSAGES
    complete = facts[SEEN] & both == both and _behind_space(body, at + 1) == len(body)
    return count if complete else NOT_PLAIN


@_KERNELS.kernel(_BYTES, _BYTES)
def _same_bytes(body, other):
    """How many bytes two bodies begin with that are the same."""
    size = np.uint64(min(len(body), len(other)))
    at = np.uint64(0)
    while at + _SPAN <= size:  # unsigned: indices that cannot be negative are vectorized
        differ = np.uint8(0)
        for place in range(_SPAN):
            differ |= body[at + place] ^ other[at + place]
        if differ:
            break
        at += _SPAN
    while at < size and body[at] == other[at]:
        at += np.uint64(1)
    return np.int64(at)


@lru_cache(maxsize=1)
def entry_points() -> tuple[Callable[..., Any], ...]:
    """Of ``scan`` and ``same_bytes``."""
    if not _same_bytes.signatures:
        compile_all()
    return entry_point(_scan), entry_point(_same_bytes)
