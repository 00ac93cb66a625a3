"""Which tokenizers take every word by itself, and how they cut words."""

from __future__ import annotations

import json
from typing import Any

from tokenizers import Tokenizer, models

GPT2 = 0  # in the place of a number of digits
_CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
# How many digits a word has at most. Source: ``tokenizer.json`` of Llama 3, Qwen2 and those after them.
_MOST_DIGITS = {_CL100K % r"\p{N}{1,3}": 3, _CL100K % r"\p{N}": 1}


class UnfitError(Exception):
    """The words of a tokenizer cannot be told, or are not all that its tokens depend on; the message says why."""


def most_digits_of_words(tokenizer: Tokenizer) -> int:
    """What the kernels call ``most_digits``. Raises UnfitError."""
    model = tokenizer.model
    if not isinstance(model, models.BPE):
        raise UnfitError("its model is no BPE")
    if model.dropout or model.continuing_subword_prefix or model.end_of_word_suffix:
        raise UnfitError("its merges are random or depend on where a word ends")
    stages = _state(tokenizer.pre_tokenizer)
    byte_level = stages.pop()
    if byte_level.get("type") != "ByteLevel" or byte_level.get("add_prefix_space"):
        raise UnfitError("its words are no bytes, or a space is put in front of them")
    if byte_level.get("use_regex", True):
        if stages:
            raise UnfitError("its words are cut twice")
        return GPT2
    if len(stages) != 1:
        raise UnfitError(f"its words are cut in {len(stages)} stages")
    (split,) = stages
    most_digits = _MOST_DIGITS.get(str(split.get("pattern", {}).get("Regex")))
    if most_digits is None or split.get("behavior") != "Isolated" or split.get("invert"):
        raise UnfitError("its words are cut by an expression that is not known here")
    return most_digits


def normalizes_to_nfc(tokenizer: Tokenizer) -> bool:
    """Else the text is taken as it is. Raises UnfitError where something else is done with it."""
    normalizer = tokenizer.normalizer
    if normalizer is None:
        return False
    if json.loads(normalizer.__getstate__()) != {"type": "NFC"}:
        raise UnfitError("it normalizes text")
    return True


def _state(pre_tokenizer: Any) -> list[dict[str, Any]]:
    if pre_tokenizer is None:
        raise UnfitError("it does not cut text into words")
    state: dict[str, Any] = json.loads(pre_tokenizer.__getstate__())
    stages = state["pretokenizers"] if state.get("type") == "Sequence" else [state]
    if not stages:
        raise UnfitError("it does not cut text into words")
    return list(stages)
