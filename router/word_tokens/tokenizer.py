"""Texts to token ids, word by word, with a table of those that were met."""

from __future__ import annotations

import re
import threading
import unicodedata
from functools import lru_cache

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
_MOST_PASSES = 512  # for characters of many scripts
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


class WordTokens:
    """Token ids as a tokenizer gives them without special tokens around a text. Thread-safe.

    ``specials`` are the added tokens that are matched wherever they stand, ``others`` those of which nothing of the
    kind is known. Texts with one of these, or with something else that is not sure, are left to the library.
    """

    def __init__(
        self,
        *,
        cut: Cut,
        merges: Merges,
        to_nfc: bool,
        added: re.Pattern[bytes],
        specials: dict[bytes, int],
        others: tuple[str, ...],
        max_words: int = MAX_WORDS,
    ) -> None:
        self._cut = cut
        self._merges = merges
        self._to_nfc = to_nfc
        self._added = added
        self._specials = specials
        self._others = others
        self._look_up = kernels.entry_points()[0]
        self._table = _Table(max_words)
        self._lock = threading.Lock()

    def tokens(self, text: str) -> Tokens | None:
        """None where the library has to be asked."""
        if not text.isascii() and (
            _LONG_S in text or (self._to_nfc and not unicodedata.is_normalized("NFC", text))
        ):
            return None
        if any(other in text for other in self._others):
            return None
        try:
            data = text.encode()
        except UnicodeEncodeError:  # lone surrogates
            return None
        added = self._added_in(data)
        if added is None:
            return None
        tokens = np.empty(len(data), np.uint32)
        kinds, table, merges = _kinds(), self._table, self._merges
        for _ in range(_MOST_PASSES):
            with self._lock:
                outcome, count = self._look_up(
                    np.frombuffer(data, np.uint8), kinds.of, added, *self._cut, _LONGEST_WORD_BYTES,
                    table.used, table.entries, table.words, table.ids,
                    merges.letters, merges.pairs, merges.whole, merges.whole_words, tokens,
                )  # fmt: skip
            if outcome == kernels.DONE:
                return tokens[:count].copy()
            if outcome == kernels.LEFT_TO_LIBRARY:
                return None
            kinds.learn(count)
        return None

    def _added_in(self, data: bytes) -> NDArray[np.int64] | None:
        """Begin, end and id of the added tokens in a text; None where one of them may be more than it looks."""
        found: list[int] = []
        for match in self._added.finditer(data):
            token = self._specials.get(match.group())
            if token is None:
                return None
            found += (*match.span(), token)
        return np.array(found, np.int64)


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
            others.append(content)
    if len(others) > _MOST_OTHERS:
        raise UnfitError(f"{len(others)} of its added tokens depend on what stands around them")
    words = WordTokens(
        cut=cut_of(tokenizer),
        merges=merges_of(tokenizer, _LONGEST_WORD_BYTES),
        to_nfc=normalizes_to_nfc(tokenizer),
        added=re.compile(segmentation.added.pattern.encode()),
        specials=specials,
        others=tuple(others),
        max_words=max_words,
    )
    for text in ("".join(_PROBES), *_PROBES):
        whole = "".join(f"{text}{token.decode()}" for token in list(specials)[:8]) + text
        tokens = words.tokens(whole)
        encoding = tokenizer.encode_batch_fast([whole], add_special_tokens=False)[0]
        if tokens is not None and tokens.tolist() != encoding.ids:
            raise UnfitError("the tokens of its words are not those of a text")
    return words
