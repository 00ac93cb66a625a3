"""Compiled: where words end, and the tokens of those that are known.

Known words are entries of a hash table with linear probing. An entry has a key, of up to 8 bytes the word itself,
else its hash; the word's length, 0 in an empty entry, and where its bytes stand; and how many tokens it has, with
the token where it is one, else with the place where they stand.
"""

# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numba import types

from cache_index.kernel_set import KernelSet, entry_point, inlined

_KERNELS = KernelSet(Path(__file__))
compile_all = _KERNELS.compile_all

# Kinds of characters. What follows a character's first byte is of kind INSIDE.
UNSEEN, OTHER, LETTER, NUMBER, SPACE, NEWLINE, INSIDE, UNSURE = range(8)

# What a kernel came back with.
DONE, UNSEEN_CHARACTER, UNKNOWN_WORDS, LEFT_TO_LIBRARY = range(4)

_APOSTROPHE, _BLANK = 0x27, 0x20
_LONG_S = (0xC5, 0xBF)  # an s, where case does not matter
ENTRY = 4  # words of an entry, of which one is spare: a cache line holds two
_SHIFT, _LOW = 16, 0xFFFF
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_OFFSET_BASIS, _PRIME = np.uint64(0xCBF29CE484222325), np.uint64(0x100000001B3)  # FNV-1a

_INTEGER = types.int64
_BYTES = types.Array(types.uint8, 1, "C", readonly=True)
_OUT_BYTES = types.Array(types.uint8, 1, "C")
_INTEGERS = types.Array(types.int64, 1, "C")
_IDS = types.Array(types.uint32, 1, "C", readonly=True)
_OUT_IDS = types.Array(types.uint32, 1, "C")


@inlined
def _code_point(text, at):
    """Of valid UTF-8: the character, and how many bytes it has."""
    lead = np.int64(text[at])
    if lead < 0x80:
        return lead, 1
    if lead < 0xE0:
        return (lead & 0x1F) << 6 | np.int64(text[at + 1] & 0x3F), 2
    if lead < 0xF0:
        return (lead & 0x0F) << 12 | np.int64(text[at + 1] & 0x3F) << 6 | np.int64(text[at + 2] & 0x3F), 3
    high = (lead & 0x07) << 18 | np.int64(text[at + 1] & 0x3F) << 12
    return high | np.int64(text[at + 2] & 0x3F) << 6 | np.int64(text[at + 3] & 0x3F), 4


@inlined
def _classify(text, kind_of, kinds):
    """The kind of every byte; returns how it went, and a character that is unseen."""
    at = 0
    while at < len(text):
        lead = text[at]
        if lead < 0x80:
            kinds[at] = kind_of[lead]
            at += 1
            continue
        character, size = _code_point(text, at)
        kind = kind_of[character]
        if kind == UNSURE:
            return LEFT_TO_LIBRARY, 0
        if kind == UNSEEN:
            return UNSEEN_CHARACTER, character
        kinds[at] = kind
        for inside in range(at + 1, at + size):
            kinds[inside] = INSIDE
        at += size
    return DONE, 0


@inlined
def _run_end(kinds, at, end, kind):
    while at < end and (kinds[at] == kind or kinds[at] == INSIDE):
        at += 1
    return at


@inlined
def _next(kinds, at, end):
    """Where the next character begins."""
    at += 1
    while at < end and kinds[at] == INSIDE:
        at += 1
    return at


@inlined
def _contraction(text, at, end, any_case):
    """How long the 's, 't, 're, 've, 'm, 'll or 'd is that begins here; 0 where none does."""
    if text[at] != _APOSTROPHE or at + 1 == end:
        return 0
    case = np.uint8(0x20) if any_case else np.uint8(0)
    first = text[at + 1] | case
    if first == ord("s") or first == ord("t") or first == ord("m") or first == ord("d"):
        return 2
    if at + 2 == end:
        return 0
    second = text[at + 2] | case
    if (first == ord("r") or first == ord("v")) and second == ord("e"):
        return 3
    return 3 if first == ord("l") and second == ord("l") else 0


@inlined
def _is_long_s(text, at, end):
    """Whether it depends on the library whether this is a contraction."""
    return (
        text[at] == _APOSTROPHE and at + 2 < end and text[at + 1] == _LONG_S[0] and text[at + 2] == _LONG_S[1]
    )


@inlined
def _gpt2_word_end(text, kinds, at, end):
    """`'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+`, or `at`."""
    length = _contraction(text, at, end, False)
    if length:
        return at + length
    begin = at
    if text[at] == _BLANK and at + 1 < end:
        begin = at + 1
    kind = kinds[begin]
    if kind in (LETTER, NUMBER, OTHER):
        return _run_end(kinds, begin, end, kind)
    return at


@inlined
def _cl100k_word_end(text, kinds, at, end, most_digits):
    """Llama 3's and Qwen's, which differ in ``most_digits``:

    `(?i:'s|…|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*`, or `at`.
    """
    length = _contraction(text, at, end, True)
    if length:
        return at + length
    kind = kinds[at]
    if kind == LETTER:
        return _run_end(kinds, at, end, LETTER)
    if kind == NUMBER:
        for _ in range(most_digits):
            if at < end and kinds[at] == NUMBER:
                at = _next(kinds, at, end)
        return at
    following = _next(kinds, at, end)
    if kind != NEWLINE and following < end and kinds[following] == LETTER:
        return _run_end(kinds, following, end, LETTER)
    if kind == OTHER:
        return _run_end(kinds, _run_end(kinds, at, end, OTHER), end, NEWLINE)
    if text[at] == _BLANK and following < end and kinds[following] == OTHER:
        return _run_end(kinds, _run_end(kinds, following, end, OTHER), end, NEWLINE)
    return at


@inlined
def _space_end(kinds, at, end, lines_end_words):
    """`\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+`, the first of them where ``lines_end_words``."""
    stop, last, behind_line = at, at, at
    while stop < end and (kinds[stop] == SPACE or kinds[stop] == NEWLINE or kinds[stop] == INSIDE):
        if kinds[stop] != INSIDE:
            last = stop
        stop += 1
        if kinds[stop - 1] == NEWLINE:
            behind_line = stop
    if lines_end_words and behind_line > at:
        return behind_line
    return stop if stop == end or last == at else last


@inlined
def _word_end(text, kinds, at, end, most_digits):
    """``most_digits`` of 0 stands for GPT-2's expression."""
    if most_digits == 0:
        stop = _gpt2_word_end(text, kinds, at, end)
    else:
        stop = _cl100k_word_end(text, kinds, at, end, most_digits)
    return _space_end(kinds, at, end, most_digits > 0) if stop == at else stop


@inlined
def _key(text, at, end):
    key = np.uint64(0)
    if end - at <= 8:
        for place in range(at, end):
            key = key << np.uint64(8) | np.uint64(text[place])
        return key
    key = _OFFSET_BASIS
    for place in range(at, end):
        key = (key ^ np.uint64(text[place])) * _PRIME
    return key


@inlined
def _same(text, at, end, words, start):
    if end - at > 8:
        for place in range(end - at):
            if text[at + place] != words[start + place]:
                return False
    return True


@inlined
def _entry(text, at, end, key, entries, words):
    """Where the word is, or the empty entry where it belongs."""
    last = len(entries) - ENTRY
    mixed = (key ^ np.uint64(end - at)) * _MULTIPLIER
    entry = np.int64(mixed >> np.uint64(32)) * ENTRY & last
    while entries[entry + 1] and not (
        entries[entry] == np.int64(key)
        and entries[entry + 1] & _LOW == end - at
        and _same(text, at, end, words, entries[entry + 1] >> _SHIFT)
    ):
        entry = (entry + ENTRY) & last
    return entry


@_KERNELS.kernel(
    _BYTES, _BYTES, _INTEGERS, _INTEGER, _INTEGER, _INTEGERS, _OUT_BYTES, _OUT_IDS, _OUT_IDS, _INTEGERS
)  # fmt: skip
def _look_up(text, kind_of, added, most_digits, longest, entries, words, ids, tokens, unknown):
    """The tokens of a text, whose added tokens are ``added``: begin, end, id, and so on.

    Returns how it went, and how many tokens there are; or the character that is unseen; or how many numbers were
    put into ``unknown``, the begin and end of each word.
    """
    kinds = np.empty(len(text), np.uint8)
    outcome, character = _classify(text, kind_of, kinds)
    if outcome != DONE:
        return outcome, character
    count, missing, at, place = 0, 0, 0, 0
    while at < len(text) or place < len(added):
        end = added[place] if place < len(added) else len(text)
        while at < end:
            stop = _word_end(text, kinds, at, end, most_digits)
            if stop - at > longest or _is_long_s(text, at, end):
                return LEFT_TO_LIBRARY, 0
            key = _key(text, at, stop)
            entry = _entry(text, at, stop, key, entries, words)
            known = entries[entry + 2]
            if known & _LOW == 1:
                tokens[count] = known >> _SHIFT
                count += 1
            elif known:
                first = known >> _SHIFT
                for each in range(first, first + (known & _LOW)):
                    tokens[count] = ids[each]
                    count += 1
            else:
                unknown[missing], unknown[missing + 1] = at, stop
                missing += 2
                if missing == len(unknown):
                    return UNKNOWN_WORDS, missing
            at = stop
        if place < len(added):
            tokens[count] = added[place + 2]
            count += 1
            at = added[place + 1]
            place += 3
    if missing:
        return UNKNOWN_WORDS, missing
    return DONE, count


@_KERNELS.kernel(_BYTES, _IDS, _INTEGER, _INTEGER, _INTEGERS, _OUT_BYTES, _OUT_IDS)
def _keep(word, word_ids, word_start, first_id, entries, words, ids):
    """Unless it is known; whether it was kept."""
    key = _key(word, 0, len(word))
    entry = _entry(word, 0, len(word), key, entries, words)
    if entries[entry + 1]:
        return False
    for place in range(len(word)):
        words[word_start + place] = word[place]
    for place in range(len(word_ids)):
        ids[first_id + place] = word_ids[place]
    stands = np.int64(word_ids[0]) if len(word_ids) == 1 else first_id
    entries[entry] = np.int64(key)
    entries[entry + 1] = word_start << _SHIFT | len(word)
    entries[entry + 2] = stands << _SHIFT | len(word_ids)
    return True


@lru_cache(maxsize=1)
def entry_points() -> tuple[Callable[..., Any], ...]:
    """Of ``look_up`` and ``keep``."""
    if not _keep.signatures:
        compile_all()
    return entry_point(_look_up), entry_point(_keep)
