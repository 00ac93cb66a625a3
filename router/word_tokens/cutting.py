"""Compiled: where the word ends that begins at a place of a text. The kind of every byte is known.

Expressions are told apart by style; every alternative stands in the docstring of the function that matches it.
"""

# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

import numpy as np

from cache_index.kernel_set import inlined

# Kinds of characters, those of letters first. What follows a character's first byte is of kind INSIDE.
UPPER, LOWER, CASELESS, MARK, NUMBER, SPACE, NEWLINE, SIGN, OTHER, INSIDE, EAST_ASIAN, UNSEEN, UNSURE = range(
    13
)

# How words are cut; see `words`.
GPT2, CL100K, CL100K_MARKS, O200K, TEKKEN, DEEPSEEK = range(6)

_APOSTROPHE, _BLANK, _SLASH = 0x27, 0x20, 0x2F


@inlined
def _run_end(kinds, at, end, kind):
    while at < end and (kinds[at] == kind or kinds[at] == INSIDE):
        at += 1
    return at


@inlined
def _letters_end(kinds, at, end, last):
    while at < end and (kinds[at] <= last or kinds[at] == INSIDE):
        at += 1
    return at


@inlined
def _signs_end(kinds, at, end, marks):
    """`[^\\s\\p{L}\\p{N}]*`, with or without marks."""
    while at < end and (
        kinds[at] == SIGN or kinds[at] == OTHER or kinds[at] == INSIDE or (marks and kinds[at] == MARK)
    ):
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
def _numbers_end(kinds, at, end, most):
    for _ in range(most):
        if at < end and kinds[at] == NUMBER:
            at = _next(kinds, at, end)
    return at


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
    if kind <= CASELESS:
        return _letters_end(kinds, begin, end, CASELESS)
    if kind == NUMBER:
        return _run_end(kinds, begin, end, NUMBER)
    stop = _signs_end(kinds, begin, end, True)
    return stop if stop > begin else at


@inlined
def _cl100k_word_end(text, kinds, at, end, last, most_digits):
    """Llama 3's and Qwen's, which differ in ``most_digits``, and in whether words have marks, up to Qwen 3:

    `(?i:'s|…|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*`, or `at`.
    """
    length = _contraction(text, at, end, True)
    if length:
        return at + length
    kind = kinds[at]
    if kind <= last:
        return _letters_end(kinds, at, end, last)
    if kind == NUMBER:
        return _numbers_end(kinds, at, end, most_digits)
    following = _next(kinds, at, end)
    if kind != NEWLINE and following < end and kinds[following] <= last:
        return _letters_end(kinds, following, end, last)
    begin = at + 1 if text[at] == _BLANK else at
    stop = _signs_end(kinds, begin, end, last != MARK)
    return _run_end(kinds, stop, end, NEWLINE) if stop > begin else at


@inlined
def _cased_end(kinds, at, end, needs_lower):
    """`U*L+` or, unless ``needs_lower``, `U+L*`, or `at`.

    U is `[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]` and L `[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]`.
    """
    upper_end, behind_both = at, at
    while upper_end < end:
        kind = kinds[upper_end]
        if kind == INSIDE:
            behind_both += behind_both == upper_end
        elif kind in (CASELESS, MARK):
            behind_both = upper_end + 1
        elif kind != UPPER:
            break
        upper_end += 1
    stop = upper_end
    while stop < end and kinds[stop] in (LOWER, CASELESS, MARK, INSIDE):
        stop += 1
    if needs_lower:
        return stop if stop > upper_end else behind_both  # U* gives back as little as makes an L
    return stop if upper_end > at else at


@inlined
def _o200k_word_end(text, kinds, at, end, contracts, most_digits):
    """`P?U*L+C?|P?U+L*C?|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n/]*`, or `at`.

    P is `[^\\r\\n\\p{L}\\p{N}]`, C a contraction in any case, where words have them.
    """
    kind = kinds[at]
    if kind == NUMBER:
        return _numbers_end(kinds, at, end, most_digits)
    following = _next(kinds, at, end)
    may_precede = kind > CASELESS and kind != NEWLINE
    stop = at
    for needs_lower in (True, False):
        if may_precede and stop == at:
            behind = _cased_end(kinds, following, end, needs_lower)
            if behind > following:
                stop = behind
        if stop == at:
            behind = _cased_end(kinds, at, end, needs_lower)
            if behind > at:
                stop = behind
    if stop > at:
        return stop + _contraction(text, stop, end, True) if contracts and stop < end else stop
    begin = at + 1 if text[at] == _BLANK else at
    stop = _signs_end(kinds, begin, end, True)
    if stop == begin:
        return at
    while stop < end and (kinds[stop] == NEWLINE or text[stop] == _SLASH):
        stop += 1
    return stop


@inlined
def _is_ascii_letter(byte):
    return 0x61 <= byte | 0x20 <= 0x7A


@inlined
def _deepseek_match_end(text, kinds, at, end):
    """Of the third of DeepSeek-V3's expressions, without its spaces, or `at`:

    `[!-/:-@[-`{-~][A-Za-z]+|[^\\r\\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\\r\\n]*`.
    """
    kind = kinds[at]
    if kind == SIGN and text[at] < 0x80 and at + 1 < end and _is_ascii_letter(text[at + 1]):
        stop = at + 1
        while stop < end and _is_ascii_letter(text[stop]):
            stop += 1
        return stop
    if kind <= MARK:
        return _letters_end(kinds, at, end, MARK)
    following = _next(kinds, at, end)
    if kind != NEWLINE and kind != SIGN and following < end and kinds[following] <= MARK:
        return _letters_end(kinds, following, end, MARK)
    begin = at + 1 if text[at] == _BLANK else at
    stop = begin
    while stop < end and (kinds[stop] == SIGN or (kinds[stop] == INSIDE and stop > begin)):
        stop += 1
    return _run_end(kinds, stop, end, NEWLINE) if stop > begin else at


@inlined
def _deepseek_word_end(text, kinds, at, end):
    """Numbers first, then Chinese and Japanese, then the rest; what no expression matches is left as one piece."""
    if kinds[at] == NUMBER:
        return _numbers_end(kinds, at, end, 3)
    if kinds[at] == EAST_ASIAN:
        return _run_end(kinds, at, end, EAST_ASIAN)
    stop = _deepseek_match_end(text, kinds, at, end)
    if stop > at:
        return stop
    stop = at
    while stop < end and kinds[stop] == OTHER and _deepseek_match_end(text, kinds, stop, end) == stop:
        stop = _next(kinds, stop, end)
    return stop


@inlined
def _space_end(kinds, at, end, style):
    """`\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+`, but GPT-2's has not the first.

    To the last of DeepSeek's expressions, a text ends with what an earlier one has matched.
    """
    stop, last, behind_line = at, at, at
    while stop < end and (kinds[stop] == SPACE or kinds[stop] == NEWLINE or kinds[stop] == INSIDE):
        if kinds[stop] != INSIDE:
            last = stop
        stop += 1
        if kinds[stop - 1] == NEWLINE:
            behind_line = stop
    if style != GPT2 and behind_line > at:
        return behind_line
    ends = stop == end or (style == DEEPSEEK and (kinds[stop] == NUMBER or kinds[stop] == EAST_ASIAN))
    return stop if ends or last == at else last


@inlined
def word_end(text, kinds, at, end, style, most_digits):
    if style == GPT2:
        stop = _gpt2_word_end(text, kinds, at, end)
    elif style == CL100K:
        stop = _cl100k_word_end(text, kinds, at, end, CASELESS, most_digits)
    elif style == CL100K_MARKS:
        stop = _cl100k_word_end(text, kinds, at, end, MARK, most_digits)
    elif style == DEEPSEEK:
        stop = _deepseek_word_end(text, kinds, at, end)
    else:
        stop = _o200k_word_end(text, kinds, at, end, style == O200K, most_digits)
    return stop if stop > at else _space_end(kinds, at, end, style)
