"""What byte-level BPE makes of a word that was never met, as tables that the kernels read."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import compress

import numpy as np
import orjson
from numpy.typing import NDArray
from tokenizers import Tokenizer

from router.word_tokens import kernels
from router.word_tokens.words import UnfitError


@dataclass(frozen=True, slots=True)
class Merges:
    """``letters`` [byte] are the tokens of single bytes, -1 where there is none; ``pairs`` what merges, and
    ``whole`` with ``whole_words`` the words that are a token of their own whatever merges: see `kernels`.
    """

    letters: NDArray[np.int64]
    pairs: NDArray[np.int64]
    whole: NDArray[np.int64]
    whole_words: NDArray[np.uint8]


def merges_of(tokenizer: Tokenizer, longest_word_bytes: int) -> Merges:
    """Of a byte-level BPE. Raises UnfitError where what merges is no token."""
    model = orjson.loads(tokenizer.model.__getstate__())
    vocabulary: dict[str, int] = model["vocab"]
    _, keep_pairs, differ, keep_words = kernels.entry_points()
    letters = np.array([vocabulary.get(letter, -1) for letter in _letters()], np.int64)
    merges: list[tuple[str, str]] = model["merges"]
    try:
        lefts = np.array([vocabulary[left] for left, _ in merges], np.int64)
        rights = np.array([vocabulary[right] for _, right in merges], np.int64)
        becomes = np.array([vocabulary[left + right] for left, right in merges], np.int64)
    except KeyError as error:
        raise UnfitError(f"what merges is no token: {error}") from error
    pairs = np.full(2 * _slots(len(merges)), kernels.NO_PAIR, np.int64)
    keep_pairs(lefts, rights, becomes, pairs)
    words = _words(vocabulary, longest_word_bytes) if model["ignore_merges"] else {}
    differs = np.zeros(len(words), np.uint8)
    differ(*_in_a_row(words), longest_word_bytes, _numbers(words), letters, pairs, differs)
    words = dict(compress(words.items(), differs.tolist()))  # few
    whole = np.zeros(_slots(len(words)) * kernels.ENTRY, np.int64)
    text, ends = _in_a_row(words)
    whole_words = np.zeros(len(text), np.uint8)
    keep_words(text, ends, _numbers(words), whole, whole_words)
    return Merges(letters, pairs, whole, whole_words)


@lru_cache(maxsize=1)
def _letters() -> str:
    """What stands for each byte in the vocabulary of byte-level BPE (GPT-2's ``bytes_to_unicode``)."""
    shown = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(0x100) if byte not in shown]
    return "".join(chr(byte) if byte in shown else chr(0x100 + hidden.index(byte)) for byte in range(0x100))


def _words(vocabulary: dict[str, int], longest_bytes: int) -> dict[bytes, int]:
    """The tokens of more than one byte as words."""
    bytes_of = dict.fromkeys(range(0x100), "\uffff") | {
        ord(each): byte for byte, each in enumerate(_letters())
    }
    found = {}
    for token, number in vocabulary.items():
        if 1 < len(token) <= longest_bytes:
            with suppress(UnicodeEncodeError):  # it is no word
                found[token.translate(bytes_of).encode("latin-1")] = number
    return found


def _in_a_row(words: dict[bytes, int]) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Their bytes, and where each ends."""
    return np.frombuffer(b"".join(words), np.uint8), np.cumsum([len(word) for word in words], dtype=np.int64)


def _numbers(words: dict[bytes, int]) -> NDArray[np.uint32]:
    return np.array(list(words.values()), np.uint32)


def _slots(count: int) -> int:
    """A power of two, of which half stays empty."""
    return 1 << max(2 * count, 1).bit_length()
