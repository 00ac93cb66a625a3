"""Compiled: the JSON of a plain chat, read without making objects of it.

Understood is one object with the fields of `FIELDS`, each at most once, whose ``messages`` are objects of exactly a
role and a text, in this order. Whatever else may be right or wrong with a body is for somebody else to say:
`scan` only tells that it is not plain. All of what it calls plain is valid JSON.
"""

# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from typing import Final

import numpy as np

from cache_index.kernel_set import inlined, outlined
from router.plain_chats.json_ends import (
    CLOSE,
    CLOSE_LIST,
    COLON,
    COMMA,
    MOST_DIGITS,
    NOT_PLAIN,
    OPEN,
    OPEN_LIST,
    QUOTE,
    behind,
    behind_space,
    digits_end,
    literal_end,
    string_end,
    value_end,
    which,
)

ROLES: Final = ("system", "user", "assistant")

# What is read of a request; -1 where it does not say. ``SEEN`` has a bit for each field of the body.
MODEL_BEGIN, MODEL_END, STREAM, MAX_TOKENS, MAX_COMPLETION_TOKENS, COUNT, SEEN, FACTS = range(8)
_NUMBERS: Final = {"max_tokens": MAX_TOKENS, "max_completion_tokens": MAX_COMPLETION_TOKENS, "n": COUNT}
# Fields that neither the prompt nor its placement depends on.
_OTHERS: Final = (
    *("stream_options", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "user"),
    *("frequency_penalty", "presence_penalty", "repetition_penalty", "logprobs", "top_logprobs"),
    *("logit_bias", "ignore_eos", "min_tokens", "response_format", "service_tier", "metadata"),
    "skip_special_tokens",
)
FIELDS: Final = ("model", "messages", "stream", *_NUMBERS, *_OTHERS)
_MODEL, _MESSAGES, _STREAM, _FIRST_NUMBER = range(4)
_FIRST_OTHER: Final = _FIRST_NUMBER + len(_NUMBERS)

# Of each message: where its content stands, how it is written, and where the message ends.
BEGIN, END, WRITTEN, MESSAGE_END, MESSAGE = range(5)

_NAMES = np.frombuffer("".join(FIELDS).encode(), np.uint8)
_NAME_ENDS = np.cumsum([len(name) for name in FIELDS], dtype=np.int64)
_ROLE_NAMES = np.frombuffer("".join(ROLES).encode(), np.uint8)
_ROLE_ENDS = np.cumsum([len(role) for role in ROLES], dtype=np.int64)
_MESSAGE_NAMES = np.frombuffer(b"rolecontent", np.uint8)
_MESSAGE_NAME_ENDS = np.array([4, 11], np.int64)


@inlined
def _message_end(body, at, messages, roles, count):
    """Behind the message that begins here, which is put behind ``count`` others."""
    at = behind(body, at, OPEN)
    if at == NOT_PLAIN:
        return NOT_PLAIN
    name, at = which(body, at, _MESSAGE_NAMES, _MESSAGE_NAME_ENDS)
    if name != 0:
        return NOT_PLAIN
    at = behind(body, at, COLON)
    if at == NOT_PLAIN:
        return NOT_PLAIN
    role, at = which(body, at, _ROLE_NAMES, _ROLE_ENDS)
    if role < 0:
        return NOT_PLAIN
    at = behind(body, at, COMMA)
    if at == NOT_PLAIN:
        return NOT_PLAIN
    name, at = which(body, at, _MESSAGE_NAMES, _MESSAGE_NAME_ENDS)
    if name != 1:
        return NOT_PLAIN
    at = behind(body, at, COLON)
    if at == NOT_PLAIN or at >= len(body) or body[at] != QUOTE:
        return NOT_PLAIN
    end, written = string_end(body, at + 1)
    if end == NOT_PLAIN:
        return NOT_PLAIN
    first = MESSAGE * count
    roles[count] = role
    messages[first + BEGIN] = at + 1
    messages[first + END] = end
    messages[first + WRITTEN] = written
    at = behind_space(body, end + 1)
    if at >= len(body) or body[at] != CLOSE:
        return NOT_PLAIN
    messages[first + MESSAGE_END] = at + 1
    return at + 1


@inlined
def _fact_end(body, at, field, facts):
    """Behind the value of a field other than ``messages``."""
    if at >= len(body):
        return NOT_PLAIN
    if field == _MODEL:
        if body[at] != QUOTE:
            return NOT_PLAIN
        end, written = string_end(body, at + 1)
        if end == NOT_PLAIN or written or end == at + 1:
            return NOT_PLAIN
        facts[MODEL_BEGIN], facts[MODEL_END] = at + 1, end
        return end + 1
    if field == _STREAM:
        end = literal_end(body, at)
        if end == NOT_PLAIN or body[at] == ord("n"):
            return NOT_PLAIN
        facts[STREAM] = body[at] == ord("t")
        return end
    if field >= _FIRST_OTHER:
        return value_end(body, at)
    end = digits_end(body, at)
    if end == at or end - at > MOST_DIGITS or (body[at] == 0x30 and end > at + 1):
        return NOT_PLAIN
    if end < len(body) and (body[end] == ord(".") or body[end] | 0x20 == ord("e")):
        return NOT_PLAIN
    number = np.int64(0)
    for place in range(at, end):
        number = number * 10 + (np.int64(body[place]) - 0x30)
    facts[MAX_TOKENS + field - _FIRST_NUMBER] = number
    return end


@inlined
def _messages_end(body, at, is_first, messages, roles):
    """Behind a list of messages that begins here, or goes on behind one of them, and how many there are."""
    count = 0
    while True:
        if not is_first:
            at = behind_space(body, at)
            if at < len(body) and body[at] == CLOSE_LIST:
                return at + 1, count
            at = behind(body, at, COMMA)
        if at == NOT_PLAIN or count == len(roles):
            return NOT_PLAIN, count
        at = _message_end(body, at, messages, roles, count)
        if at == NOT_PLAIN:
            return NOT_PLAIN, count
        count += 1
        is_first = False


@outlined
def scan(body, known_end, facts, facts_before, messages, roles):
    """How many messages a plain chat has, `NOT_PLAIN` if it is none or they are too many for ``roles``.

    Where the body is known up to the end of a message, that is ``known_end``, only the messages behind it are read,
    and ``facts`` are what is said in front of the messages; 0 where nothing is known. ``facts_before`` gets that.
    """
    count, at, goes_on = 0, known_end, known_end > 0
    if not goes_on:
        facts[:] = -1
        facts[SEEN] = 0
        at = behind(body, 0, OPEN)
    while at != NOT_PLAIN:
        field = _MESSAGES
        if not goes_on:
            field, at = which(body, at, _NAMES, _NAME_ENDS)
            if field < 0 or facts[SEEN] >> field & 1:
                return NOT_PLAIN
            facts[SEEN] |= 1 << field
            at = behind(body, at, COLON)
        if at != NOT_PLAIN and field == _MESSAGES:
            facts_before[:] = facts
            if not goes_on:
                at = behind(body, at, OPEN_LIST)
            if at != NOT_PLAIN:
                at, count = _messages_end(body, at, not goes_on, messages, roles)
        elif at != NOT_PLAIN:
            at = _fact_end(body, at, field, facts)
        goes_on = False
        if at == NOT_PLAIN:
            return NOT_PLAIN
        at = behind_space(body, at)
        if at < len(body) and body[at] == CLOSE:
            both = 1 << _MODEL | 1 << _MESSAGES
            complete = facts[SEEN] & both == both and behind_space(body, at + 1) == len(body)
            return count if complete else NOT_PLAIN
        at = behind(body, at, COMMA)
    return NOT_PLAIN
