"""Texts to token ids, word by word, with a table of those that were met."""

from __future__ import annotations

import threading
import unicodedata
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from conductor.placement import Tokens
from router.segments import Segmentation
from router.word_tokens import kernels
from router.word_tokens.characters import CharacterKinds
from router.word_tokens.merges import Merges, merges_of
from router.word_tokens.words import Cut, UnfitError, cut_of, normalizes_to_nfc

MAX_WORDS = 1 << 16  # what a language has in use, several times; 7 MB
_BYTES_A_WORD, _IDS_A_WORD = 16, 8
_LONGEST_WORD_BYTES = 256
_LONG_S = "'\u017f"  # which may be a contraction where case does not matter
_MOST_OTHERS = 16
MOST_PASSES = 512  # for characters of many scripts
_PROBES = (
    "Hello  world's\n\n  it'S 12345 67\t\tx \r\n end ",
    "naïve café 東京 12345 ½ \u00a0\u2003 é!? ...\n'll 'LL we'Re",
    "  def f(x):\n\treturn {'a': 1}  # ok\n\n\n",
)


@lru_cache(maxsize=1)
def _kinds() -> CharacterKinds:
    return CharacterKinds()


class _Table:
    """The words that are known, a power of two at most: arrays that the kernels read and write."""

    def __init__(self, max_words: int) -> None:
        self.used = np.zeros(3, np.int64)
        self.entries = np.zeros(2 * max_words * kernels.ENTRY, np.int64)
        # Of which one word has room, however long it is and however few there may be.
        self.words = np.zeros(max_words * _BYTES_A_WORD + _LONGEST_WORD_BYTES, np.uint8)
        self.ids = np.zeros(max_words * _IDS_A_WORD + _LONGEST_WORD_BYTES, np.uint32)


class Added(NamedTuple):
    """Added tokens as the kernels read them: ``starts`` marks their first and their second bytes."""

    starts: NDArray[np.uint8]
    text: NDArray[np.uint8]
    ends: NDArray[np.int64]
    ids: NDArray[np.int64]


class WordTokens:
    """Token ids as a tokenizer gives them without special tokens around a text. Thread-safe.

    Texts with an added token of which nothing is known, or with something else that is not sure, are left to the
    library. Who calls a kernel with the ``tables_address`` holds the ``lock``.
    """

    def __init__(
        self,
        *,
        cut: Cut,
        merges: Merges,
        to_nfc: bool,
        added: Added,
        max_words: int = MAX_WORDS,
    ) -> None:
        self._to_nfc = to_nfc
        self._look_up = kernels.entry_points()[0]
        table = _Table(max_words)
        self._arrays = (
            _kinds().of, *added, table.used, table.entries, table.words, table.ids,
            merges.letters, merges.pairs, merges.whole, merges.whole_words,
        )  # fmt: skip
        first = added.starts[0].nonzero()[0]
        only_start = first.item() if len(first) == 1 else -1
        self._tables = kernels.table_addresses(*cut, _LONGEST_WORD_BYTES, only_start, self._arrays)
        self.tables_address = int(self._tables.ctypes.data)
        self.lock = threading.Lock()

    def tokens(self, text: str) -> Tokens | None:
        """None where the library has to be asked."""
        try:
            data = text.encode()
        except UnicodeEncodeError:  # lone surrogates
            return None
        if len(data) > len(text) and not self.is_sure(text):
            return None
        tokens = np.empty(len(data), np.uint32)
        for _ in range(MOST_PASSES):
            with self.lock:
                outcome, count = self._look_up(np.frombuffer(data, np.uint8), self.tables_address, tokens)
            if outcome == kernels.DONE:
                return tokens[:count].copy()
            if outcome == kernels.LEFT_TO_LIBRARY:
                return None
            self.learn(count)
        return None

    def is_sure(self, text: str) -> bool:
        """Whether what is not ASCII in a text is looked up as the library would take it."""
        return _LONG_S not in text and not (self._to_nfc and not unicodedata.is_normalized("NFC", text))

    def learn(self, character: int) -> None:
        """Of the kinds of characters, what a kernel came upon as unseen."""
        _kinds().learn(character)


def word_tokens_of(
    tokenizer: Tokenizer, segmentation: Segmentation, *, max_words: int = MAX_WORDS
) -> WordTokens:
    """Of a tokenizer that must not be changed afterwards, with the segmentation of its texts. Raises UnfitError."""
    specials, others = {}, []
    for token, added in tokenizer.get_added_tokens_decoder().items():
        content = added.content
        if content in segmentation.boundaries and not added.rstrip:
            specials[content.encode()] = token
        else:
            others.append(content.encode())
    if len(others) > _MOST_OTHERS or b"" in others:
        raise UnfitError(f"{len(others)} of its added tokens depend on what stands around them")
    words = WordTokens(
        cut=cut_of(tokenizer),
        merges=merges_of(tokenizer, _LONGEST_WORD_BYTES),
        to_nfc=normalizes_to_nfc(tokenizer),
        added=_added(specials, others),
        max_words=max_words,
    )
    for text in ("".join(_PROBES), *_PROBES):
        whole = "".join(f"{text}{token.decode()}" for token in list(specials)[:8]) + text
        tokens = words.tokens(whole)
        encoding = tokenizer.encode_batch_fast([whole], add_special_tokens=False)[0]
        if tokens is not None and tokens.tolist() != encoding.ids:
            raise UnfitError("the tokens of its words are not those of a text")
    return words


def _added(specials: dict[bytes, int], others: list[bytes]) -> Added:
    ids = {
        content: kernels.FORBIDDEN if any(other in content for other in others) else token
        for content, token in specials.items()
    } | dict.fromkeys(others, kernels.FORBIDDEN)
    contents = sorted(ids, key=len, reverse=True)
    starts = np.zeros((2, 0x100), np.uint8)
    for content in contents:
        starts[0, content[0]] = 1
        starts[1, content[1] if len(content) > 1 else slice(None)] = 1
    return Added(
        starts,
        np.frombuffer(b"".join(contents), np.uint8),
        np.cumsum([len(content) for content in contents], dtype=np.int64),
        np.array([ids[content] for content in contents], np.int64),
    )
