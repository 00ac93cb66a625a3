"""Compiled: the words of a text, and the tokens of those that are known.

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
from router.word_tokens import cutting
from router.word_tokens.cutting import DEEPSEEK, EAST_ASIAN, INSIDE, UNSEEN, UNSURE, word_end

_KERNELS = KernelSet(Path(__file__), Path(cutting.__file__))
compile_all = _KERNELS.compile_all

# What a kernel came back with.
DONE, UNSEEN_CHARACTER, UNKNOWN_WORDS, LEFT_TO_LIBRARY = range(4)

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
def _is_east_asian(character):
    """`[\\u4e00-\\u9fa5\\u3040-\\u309f\\u30a0-\\u30ff]`, as one of DeepSeek's expressions has it."""
    return 0x3040 <= character <= 0x30FF or 0x4E00 <= character <= 0x9FA5


@inlined
def _classify(text, kind_of, style, kinds):
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
        if style == DEEPSEEK and _is_east_asian(character):
            kind = np.uint8(EAST_ASIAN)
        kinds[at] = kind
        for inside in range(at + 1, at + size):
            kinds[inside] = INSIDE
        at += size
    return DONE, 0


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
    _BYTES, _BYTES, _INTEGERS, _INTEGER, _INTEGER, _INTEGER, _INTEGERS, _OUT_BYTES, _OUT_IDS, _OUT_IDS, _INTEGERS
)  # fmt: skip
def _look_up(text, kind_of, added, style, most_digits, longest, entries, words, ids, tokens, unknown):
    """The tokens of a text, whose added tokens are ``added``: begin, end, id, and so on.

    Returns how it went, and how many tokens there are; or the character that is unseen; or how many numbers were
    put into ``unknown``, the begin and end of each word.
    """
    kinds = np.empty(len(text), np.uint8)
    outcome, character = _classify(text, kind_of, style, kinds)
    if outcome != DONE:
        return outcome, character
    count, missing, at, place = 0, 0, 0, 0
    while at < len(text) or place < len(added):
        end = added[place] if place < len(added) else len(text)
        while at < end:
            stop = word_end(text, kinds, at, end, style, most_digits)
            if stop - at > longest:
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
