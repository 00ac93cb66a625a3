"""Where a prompt's text falls into segments whose tokens do not depend on what stands around them.

A tokenizer first cuts a text at its added tokens, and normalizes, pre-tokenizes and merges every piece between
two of them on its own; all that a piece knows of its surroundings is whether it begins the text (which decides
about the prefix space of SentencePiece models). So what follows an added token, up to the next one, has tokens
of its own: a segment is such a token and the piece behind it, or the piece in front of the first one.
Source: ``AddedVocabulary::extract_and_normalize`` and ``Metaspace::pre_tokenize`` of Hugging Face's tokenizers.
"""

from __future__ import annotations

import itertools
import re
import string
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from tokenizers import AddedToken, Tokenizer

from conductor.placement import Tokens

_FIRST_CHARACTERS = frozenset(string.punctuation) - {
    "_"
}  # no space that a neighbour strips, no letter of a word
_PROBED_TOKENS = 64
_PROBES = ("{}", " a{}", "b {} é", "\n{}\n\n", "  {}  c", "▁{}▁", "1{}2")


class IndivisibleError(Exception):
    """The tokens of a text cannot be put together from those of its parts; the message says why."""


@dataclass(frozen=True, slots=True)
class Segmentation:
    """``added`` matches added tokens; those among the ``boundaries`` begin segments.

    ``begins`` tells of every token id whether it is that of a boundary. ``separators`` are boundaries that are
    matched wherever their text stands. Where a ``separator`` is given, it is the only boundary.
    """

    added: re.Pattern[str]
    boundaries: frozenset[str]
    begins: npt.NDArray[np.bool_]
    separators: frozenset[str]
    separator: str | None = None

    def by(self, separator: str, token: int) -> Segmentation:
        """At one of the separators alone, which is many times as fast."""
        begins = np.zeros_like(self.begins)
        begins[token] = True
        return Segmentation(self.added, frozenset((separator,)), begins, self.separators, separator)

    def split(self, text: str) -> list[str]:
        """The segments, which together are the text; none of an empty text. Linear in its length."""
        separator = self.separator
        if separator is not None:
            first, *others = text.split(separator)
            segments = [separator + other for other in others]
            return [first, *segments] if first else segments
        boundaries = self.boundaries
        cuts = [match.start() for match in self.added.finditer(text) if match.group() in boundaries]
        if not cuts:
            return [text] if text else []
        if cuts[0]:
            cuts.insert(0, 0)
        cuts.append(len(text))
        return [text[start:end] for start, end in itertools.pairwise(cuts)]

    def split_tokens(self, tokens: Tokens, segments: list[str]) -> list[Tokens] | None:
        """The tokens of each of the segments, from those of the text that they make up.

        None when plain text gave the id of a boundary too, so that one cannot be told from the other.
        """
        starts = self.begins[tokens].nonzero()[0]
        first = self.added.match(segments[0])
        begins_so = first is not None and first.group() in self.boundaries
        if len(starts) != (len(segments) if begins_so else len(segments) - 1):
            return None
        cuts = [*(starts[1:] if begins_so else starts).tolist(), len(tokens)]
        return [tokens[start:end] for start, end in itertools.pairwise([0, *cuts])]


def segmentation_of(tokenizer: Tokenizer, encode: Callable[[str], Tokens]) -> Segmentation:
    """How texts of this tokenizer fall into segments. ``encode`` must add no special tokens.

    Raises IndivisibleError: the tokenizer is random, cuts or fills up what it returns, has components written in
    Python (which may keep state), or has no added tokens that are sure to be matched wherever they stand.
    """
    _refuse_what_is_not_local(tokenizer)
    literal = {
        token.content: token
        for token in tokenizer.get_added_tokens_decoder().values()
        if not token.normalized
    }
    choices = [_of_first(character, literal) for character in sorted(_FIRST_CHARACTERS)]
    added, boundaries = max(choices, key=lambda choice: len(choice[1]))
    if not boundaries:
        raise IndivisibleError("it has no added tokens that are matched wherever they stand")
    ids: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
    begins = np.zeros(max(ids.values()) + 1, np.bool_)
    begins[[ids[content] for content in boundaries]] = True
    segmentation = Segmentation(
        re.compile(_alternatives(added)), frozenset(boundaries), begins, _separators(added, boundaries)
    )
    _probe(segmentation, boundaries, encode)
    return segmentation


def _refuse_what_is_not_local(tokenizer: Tokenizer) -> None:
    if getattr(tokenizer.model, "dropout", None):
        raise IndivisibleError("its merges drop out at random")
    if tokenizer.truncation is not None or tokenizer.padding is not None:
        raise IndivisibleError("it truncates or pads")
    if tokenizer.encode_special_tokens:
        raise IndivisibleError("it takes special tokens for plain text")
    for component in (tokenizer.normalizer, tokenizer.pre_tokenizer):
        try:
            if component is not None:
                component.__getstate__()
        except Exception:  # tokenizers raises plain Exception for what it cannot write down
            raise IndivisibleError("its normalizer or pre-tokenizer is written in Python") from None


def _of_first(character: str, literal: dict[str, AddedToken]) -> tuple[list[str], list[str]]:
    """The added tokens that begin with a character, and those of them that may begin a segment.

    Matches are leftmost-longest and do not overlap. Tokens that begin elsewhere and cannot reach across this
    character have no influence on where those that begin with it match, so only these need be searched for.
    A token that takes the space in front of it, or depends on it, may not begin a segment.
    """
    if any(character in content[1:] for content in literal if not content.startswith(character)):
        return [], []
    added = [content for content in literal if content.startswith(character)]
    alone = [content for content in added if not (literal[content].lstrip or literal[content].single_word)]
    return added, alone


def _separators(added: list[str], boundaries: list[str]) -> frozenset[str]:
    """The boundaries that are matched wherever their text stands; all of ``added`` begin with one character.

    They are no beginning of a longer token, and no other token that is matched in front of them reaches into them.
    """
    longer = {token[:size] for token in added for size in range(1, len(token))}
    tails = [token[at:] for token in added for at in range(1, len(token)) if token[at] == token[0]]
    return frozenset(
        token
        for token in boundaries
        if token not in longer and not any(token.startswith(tail) or tail.startswith(token) for tail in tails)
    )


def _alternatives(words: Iterable[str]) -> str:
    """A pattern of the longest of the words that matches, whose time does not grow with their number."""
    words = sorted(set(words))
    first, last = words[0], words[-1]
    shared = next(
        (at for at, pair in enumerate(zip(first, last, strict=False)) if pair[0] != pair[1]), len(first)
    )
    prefix = first[:shared]
    by_next: dict[str, list[str]] = {}
    for word in words:
        by_next.setdefault(word[len(prefix) : len(prefix) + 1], []).append(word)
    ends_here = by_next.pop("", None) is not None
    branches = [_alternatives(word[len(prefix) :] for word in those) for those in by_next.values()]
    rest = f"(?:{'|'.join(branches)})" if branches else ""
    return re.escape(prefix) + (f"{rest}?" if rest and ends_here else rest)


def _probe(segmentation: Segmentation, boundaries: list[str], encode: Callable[[str], Tokens]) -> None:
    """Compare the tokens of a text with those of its segments: what was concluded must show."""
    texts = [probe.format(token) for token in boundaries[:_PROBED_TOKENS] for probe in _PROBES]
    for text in ("".join(texts), "x y" + texts[0]):
        parts = [encode(segment) for segment in segmentation.split(text)]
        if not np.array_equal(encode(text), np.concatenate(parts)):
            raise IndivisibleError("its tokens of a text are not those of the text's parts")
