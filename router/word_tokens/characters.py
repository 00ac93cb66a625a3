"""Which kind a character is to the tokenizer library's regular expressions, asked of the library itself.

Its tables decide about every character, so they are what is asked: for 256 characters at a time, when the first of
them is met.
"""

from __future__ import annotations

import sys
import unicodedata

import numpy as np
from numpy.typing import NDArray
from tokenizers import Regex
from tokenizers.pre_tokenizers import PreTokenizer, Split

from router.word_tokens import cutting as k

_BLOCK = 256
_CLASSES = (
    (r"[\p{Lu}\p{Lt}]", k.UPPER),
    (r"\p{Ll}", k.LOWER),
    (r"[\p{Lm}\p{Lo}]", k.CASELESS),
    (r"\p{M}", k.MARK),
    (r"\p{N}", k.NUMBER),
    (r"[\p{P}\p{S}]", k.SIGN),
    (r"\s", k.SPACE),
    (r"[\r\n]", k.NEWLINE),
)


class CharacterKinds:
    """``of[character]`` is its kind; UNSEEN until :meth:`learn` was told of it."""

    def __init__(self) -> None:
        self.of: NDArray[np.uint8] = np.full(sys.maxunicode + 1, k.UNSEEN, np.uint8)
        self._classes: list[tuple[PreTokenizer, int]] = [
            (Split(Regex(expression), "removed"), kind) for expression, kind in _CLASSES
        ]
        self.learn(0)

    def learn(self, character: int) -> None:
        """The kinds of the characters around it.

        What Python's tables do not know yet is UNSURE: nobody could tell whether it is normalized.
        """
        first = character // _BLOCK * _BLOCK
        text = "".join(map(chr, range(first, first + _BLOCK)))
        kinds = np.full(_BLOCK, k.OTHER, np.uint8)
        if not 0xD800 <= first < 0xE000:  # surrogates stand in no text
            for split, kind in self._classes:
                kinds[:] = np.where(_matched(split, text), kind, kinds)
        for place, each in enumerate(text):
            if unicodedata.category(each) == "Cn":
                kinds[place] = k.UNSURE
        self.of[first : first + _BLOCK] = kinds


def _matched(split: PreTokenizer, text: str) -> NDArray[np.bool_]:
    matched = np.ones(len(text), np.bool_)
    for _, (start, stop) in split.pre_tokenize_str(text):
        matched[start:stop] = False
    return matched
