"""Compiled: the words of a text, and the tokens of each: kept ones of words that were met, else by its merges.

Known words are entries of a hash table with linear probing. An entry has a key, of up to 8 bytes the word itself,
else its hash; the word's length, 0 in an empty entry, and where its bytes stand; and how many tokens it has, with
the token where it is one, else with the place where they stand. ``used`` counts words, their bytes, and tokens that
stand elsewhere; when something has no room all are forgotten. Pairs of tokens that merge are another such table:
the pair is the key, its rank and what it becomes are the value. Added tokens stand one behind the other, the
longest first, with the id of each, or `FORBIDDEN`.
"""

# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numba import types
from numba.np.numpy_support import carray
from numpy.typing import NDArray

from cache_index.kernel_set import KernelSet, entry_point, inlined, outlined
from cache_index.kernels import machine_words
from cache_index.kernels.machine_words import (
    bytes_at,
    ids_at,
    load64,
    swap_bytes,
    trailing_zeros,
    words_at,
)
from router.word_tokens import cutting
from router.word_tokens.cutting import DEEPSEEK, EAST_ASIAN, INSIDE, UNSEEN, UNSURE, word_end

_KERNELS = KernelSet(Path(__file__), Path(cutting.__file__), Path(machine_words.__file__))
compile_all = _KERNELS.compile_all

# What a kernel came back with.
DONE, UNSEEN_CHARACTER, LEFT_TO_LIBRARY = range(3)

ENTRY = 4  # words of an entry, of which one is spare: a cache line holds two
NO_PAIR = -1
FORBIDDEN = -1  # in place of the id of an added token that texts with it are left to the library for
NOTHING = -2
WORDS, BYTES, IDS = range(3)  # of ``used``
_SHIFT, _LOW = 16, 0xFFFF
_LOW_BITS, _TOP_BITS = np.uint64(0x7F7F7F7F7F7F7F7F), np.uint64(0x8080808080808080)
_EACH = np.uint64(0x0101010101010101)  # of eight bytes
_BLOCK = np.uint64(64)
_HALF = 32  # bits of a key or a value
_NEVER = np.int64(0x7FFFFFFFFFFFFFFF)  # a rank, or a place, behind all
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_OFFSET_BASIS, _PRIME = np.uint64(0xCBF29CE484222325), np.uint64(0x100000001B3)  # FNV-1a

_INTEGER = types.int64
_BYTES = types.Array(types.uint8, 1, "C", readonly=True)
_OUT_BYTES = types.Array(types.uint8, 1, "C")
_INTEGERS = types.Array(types.int64, 1, "C")
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
def _short_word(address, at, end):
    """How long the blank with one to seven small ASCII letters behind it is that begins here, and its key, where
    every way of cutting ends a word there; else 0. What most words are is so found without a loop.
    """
    if at + 9 > end:
        return 0, np.uint64(0)
    word = load64(address + at)
    low = word & _LOW_BITS
    small = (low + _EACH * np.uint64(0x80 - ord("a"))) & ~(low + _EACH * np.uint64(0x7F - ord("z"))) & ~word
    length = trailing_zeros(~small & _TOP_BITS & ~np.uint64(0xFF)) >> 3
    following = np.int64(load64(address + at + 1) >> np.uint64(8 * (length - 1)) & np.uint64(0xFF))
    letter = ord("a") <= following | 0x20 <= ord("z")
    if word & np.uint64(0xFF) != 0x20 or length < 2 or letter or following >= 0x80 or following == ord("'"):
        return 0, np.uint64(0)
    return length, swap_bytes(word) >> np.uint64(64 - 8 * length)


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


@inlined
def _has_room(length, tokens, used, entries, words, ids):
    return (
        2 * ENTRY * (used[WORDS] + 1) <= len(entries)
        and used[BYTES] + length <= len(words)
        and used[IDS] + tokens <= len(ids)
    )


@inlined
def _put(text, at, end, key, entry, tokens, first, count, used, entries, words, ids):
    """A word in its empty entry, with the ``count`` tokens from ``first`` on."""
    word_start = used[BYTES]
    for place in range(end - at):
        words[word_start + place] = text[at + place]
    stands = np.int64(tokens[first])
    if count > 1:
        stands = used[IDS]
        for place in range(count):
            ids[stands + place] = tokens[first + place]
        used[IDS] += count
    used[BYTES] += end - at
    used[WORDS] += 1
    entries[entry] = np.int64(key)
    entries[entry + 1] = word_start << _SHIFT | (end - at)
    entries[entry + 2] = stands << _SHIFT | count


@inlined
def _pair(left, right, pairs):
    """Where the pair is, or the empty place where it belongs."""
    key = left << _HALF | right
    last = len(pairs) - 2
    place = np.int64(np.uint64(key) * _MULTIPLIER >> np.uint64(_HALF)) * 2 & last
    while pairs[place] != key and pairs[place] != NO_PAIR:
        place = (place + 2) & last
    return place


@inlined
def _merge(left, right, pairs):
    """The rank and the token of two tokens' merge as one number, `_NEVER` where they do not merge."""
    place = _pair(left, right, pairs)
    return _NEVER if pairs[place] == NO_PAIR else pairs[place + 1]


@outlined
def _merged(text, at, end, letters, pairs, merges, tokens, first):
    """Put the tokens of a word behind ``first``, and say how many: of its pairs of least rank the first merges,
    until none does. 0 where a byte has no token.
    """
    count = end - at
    for place in range(count):
        letter = letters[text[at + place]]
        if letter < 0:
            return 0
        tokens[first + place] = letter
    for place in range(count - 1):
        merges[place] = _merge(np.int64(tokens[first + place]), np.int64(tokens[first + place + 1]), pairs)
    while count > 1:
        best = 0
        for place in range(1, count - 1):
            if merges[place] < merges[best]:
                best = place
        if merges[best] == _NEVER:
            break
        tokens[first + best] = merges[best] & 0xFFFFFFFF
        count -= 1
        for place in range(best + 1, count):
            tokens[first + place] = tokens[first + place + 1]
            merges[place - 1] = merges[place]
        if best > 0:
            left = np.int64(tokens[first + best - 1])
            merges[best - 1] = _merge(left, np.int64(tokens[first + best]), pairs)
        if best < count - 1:
            right = np.int64(tokens[first + best + 1])
            merges[best] = _merge(np.int64(tokens[first + best]), right, pairs)
    return count


@inlined
def _behind_blocks(text, at, only_start):
    """Behind as many blocks as there are without the byte that all added tokens begin with, where it is one."""
    place = np.uint64(at)  # unsigned: indices that cannot be negative are vectorized
    while only_start >= 0 and place + _BLOCK <= len(text):
        found = np.uint8(0)
        for each in range(_BLOCK):
            found |= text[place + each] == only_start
        if found:
            break
        place += _BLOCK
    return np.int64(place)


@inlined
def _next_added(text, at, own_from, only_start, starts, added, added_ends, added_ids):
    """Where the first added token from ``own_from`` on begins, and which it is; `NOTHING` twice where none does.

    A forbidden one counts from ``at`` on, and is `FORBIDDEN`. ``starts`` are their first and second bytes.
    """
    place = _behind_blocks(text, at, only_start)
    looked_at = 0
    while place < len(text):
        if starts[0, text[place]] and (place + 1 == len(text) or starts[1, text[place + 1]]):
            found = NOTHING
            begin = 0
            for each in range(len(added_ends)):
                size = added_ends[each] - begin
                if place + size <= len(text) and _same_bytes(text, place, size, added, begin):
                    if added_ids[each] == FORBIDDEN:
                        return place, np.int64(FORBIDDEN)
                    if found == NOTHING and place >= own_from:
                        found = each
                begin = added_ends[each]
            if found != NOTHING:
                return place, np.int64(found)
        place += 1
        looked_at += 1
        if looked_at == np.int64(_BLOCK):
            place, looked_at = _behind_blocks(text, place, only_start), 0
    return np.int64(len(text)), np.int64(NOTHING)


@inlined
def _same_bytes(text, at, size, others, start):
    same = 0
    while same < size and text[at + same] == others[start + same]:
        same += 1
    return same == size


@outlined
def look_up(text, size, tables, tokens, places):
    """The tokens of the first ``size`` bytes of a text. ``tables`` points to `table_addresses`.

    Of each added token, ``places`` gets where it begins and how many tokens stand in front of it, as far as there
    is room for such pairs; places behind all in what is left of it. Returns how it went, and how many tokens there
    are, or the character that is unseen.
    """
    style, most_digits, longest, only_start = tables[0], tables[1], tables[2], tables[3]
    kind_of = carray(bytes_at(tables[4]), tables[5])
    starts = carray(bytes_at(tables[6]), (2, 0x100))
    added = carray(bytes_at(tables[8]), tables[9])
    added_ends = carray(words_at(tables[10]), tables[11])
    added_ids = carray(words_at(tables[12]), tables[13])
    used = carray(words_at(tables[14]), tables[15])
    entries = carray(words_at(tables[16]), tables[17])
    words = carray(bytes_at(tables[18]), tables[19])
    ids = carray(ids_at(tables[20]), tables[21])
    letters = carray(words_at(tables[22]), tables[23])
    pairs = carray(words_at(tables[24]), tables[25])
    whole = carray(words_at(tables[26]), tables[27])  # words that are one token whatever merges
    whole_words = carray(bytes_at(tables[28]), tables[29])
    text = text[:size]
    kinds = np.empty(size, np.uint8)
    outcome, character = _classify(text, kind_of, style, kinds)
    if outcome != DONE:
        return outcome, character
    merges = np.empty(longest, np.int64)
    address = text.ctypes.data
    count, at, place, searched = 0, 0, 0, 0
    while at < size:
        end, which = _next_added(text, searched, at, only_start, starts, added, added_ends, added_ids)
        if which == FORBIDDEN:
            return LEFT_TO_LIBRARY, 0
        while at < end:
            length, key = _short_word(address, at, end)
            stop = at + length
            if not length:
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
                one = whole[_entry(text, at, stop, key, whole, whole_words) + 2]
                if one:
                    tokens[count] = one >> _SHIFT
                    new = 1
                else:
                    new = _merged(text, at, stop, letters, pairs, merges, tokens, count)
                    if not new:
                        return LEFT_TO_LIBRARY, 0
                if not _has_room(stop - at, new, used, entries, words, ids):
                    entries[:] = 0
                    used[:] = 0
                    entry = _entry(text, at, stop, key, entries, words)
                _put(text, at, stop, key, entry, tokens, count, new, used, entries, words, ids)
                count += new
            at = stop
        if which != NOTHING:
            if place < len(places):
                places[place] = at
                places[place + 1] = count
                place += 2
            tokens[count] = added_ids[which]
            count += 1
            searched = at + 1
            at += added_ends[which] - (added_ends[which - 1] if which else 0)
    for rest in range(place, len(places), 2):
        places[rest] = _NEVER
    return DONE, count


@_KERNELS.kernel(_BYTES, _INTEGER, _OUT_IDS)
def _look_up(text, tables_address, tokens):
    """`look_up` of a whole text."""
    return look_up(text, len(text), words_at(tables_address), tokens, np.empty(0, np.int64))


def table_addresses(
    style: int, most_digits: int, longest: int, only_start: int, arrays: Sequence[NDArray[Any]]
) -> NDArray[np.int64]:
    """How words are cut, the byte that all added tokens begin with (-1 where it is not one), and the address and
    size of each array that is always the same: kinds of characters; of added tokens their starts, texts, ends and
    ids; what is used, entries, words and ids of the table of words; letters, pairs, and the words that are one
    token with their bytes. They must outlive it.
    """
    places = [number for array in arrays for number in (array.ctypes.data, array.size)]
    return np.array([style, most_digits, longest, only_start, *places], np.int64)


@_KERNELS.kernel(_INTEGERS, _INTEGERS, _INTEGERS, _INTEGERS)
def _keep_pairs(lefts, rights, becomes, pairs):
    """In the order of their rank; of those that come twice, the last counts. ``pairs`` is empty before."""
    for rank in range(len(lefts)):
        place = _pair(lefts[rank], rights[rank], pairs)
        pairs[place] = lefts[rank] << _HALF | rights[rank]
        pairs[place + 1] = np.int64(rank) << _HALF | becomes[rank]


@_KERNELS.kernel(_BYTES, _INTEGERS, _INTEGER, _OUT_IDS, _INTEGERS, _INTEGERS, _OUT_BYTES)
def _differ(text, ends, longest, own, letters, pairs, differs):
    """Of words, one behind the other: 1 where the word's own token is not what its merges make of it."""
    merges, tokens = np.empty(longest, np.int64), np.empty(longest, np.uint32)
    begin = 0
    for place in range(len(ends)):
        count = _merged(text, begin, ends[place], letters, pairs, merges, tokens, 0)
        differs[place] = count != 1 or tokens[0] != own[place]
        begin = ends[place]


@_KERNELS.kernel(_BYTES, _INTEGERS, _OUT_IDS, _INTEGERS, _OUT_BYTES)
def _keep_words(text, ends, own, entries, words):
    """Words, one behind the other and each met once, with a token each. There must be room."""
    used = np.zeros(3, np.int64)
    begin = 0
    for place in range(len(ends)):
        end = ends[place]
        key = _key(text, begin, end)
        _put(text, begin, end, key, _entry(text, begin, end, key, entries, words),
             own, place, 1, used, entries, words, own)  # fmt: skip
        begin = end


@lru_cache(maxsize=1)
def entry_points() -> tuple[Callable[..., Any], ...]:
    """Of ``look_up``, ``keep_pairs``, ``differ`` and ``keep_words``."""
    if not _keep_words.signatures:
        compile_all()
    return entry_point(_look_up), entry_point(_keep_pairs), entry_point(_differ), entry_point(_keep_words)
