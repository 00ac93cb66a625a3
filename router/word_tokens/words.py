"""Which tokenizers take every word by itself, and how they cut words."""

from __future__ import annotations

import json
from typing import Any, Final, NamedTuple

from tokenizers import Tokenizer, models

from router.word_tokens import cutting as k

_CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_LETTERS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+%s"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*%s"
)
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n"
_CL100K = _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|%s|" + _SIGNS + "]*" + _SPACES
_CL100K_MARKS = (
    _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*" + _SPACES
)
_O200K = _LETTERS % ((_CONTRACTION + "?",) * 2) + r"|\p{N}{1,3}|" + _SIGNS + "/]*" + _SPACES
_TEKKEN = _LETTERS % ("", "") + r"|\p{N}|" + _SIGNS + "/]*" + _SPACES
_DEEPSEEK = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
    "|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
)


class Cut(NamedTuple):
    """How words are cut: a style of the kernels, and how many digits a word has at most."""

    style: int
    most_digits: int = 0


# By the expressions, one after the other. Source: the ``tokenizer.json`` of the models that are named.
_CUTS: Final = {
    (_CL100K % r"\p{N}{1,3}",): Cut(k.CL100K, 3),  # Llama 3, GLM 4
    (_CL100K % r"\p{N}",): Cut(k.CL100K, 1),  # Qwen 2 to 3
    (_CL100K_MARKS,): Cut(k.CL100K_MARKS, 1),  # Qwen 3.5
    (_O200K,): Cut(k.O200K, 3),  # gpt-oss, Llama 4
    (_TEKKEN,): Cut(k.TEKKEN, 1),  # Mistral
    _DEEPSEEK: Cut(k.DEEPSEEK, 3),  # V3 and R1
}


class UnfitError(Exception):
    """The words of a tokenizer cannot be told, or are not all that its tokens depend on; the message says why."""


def cut_of(tokenizer: Tokenizer) -> Cut:
    """Raises UnfitError."""
    model = tokenizer.model
    if not isinstance(model, models.BPE):
        raise UnfitError("its model is no BPE")
    if model.dropout or model.continuing_subword_prefix or model.end_of_word_suffix:
        raise UnfitError("its merges are random or depend on where a word ends")
    stages = _stages(tokenizer.pre_tokenizer, "pretokenizers")
    if not stages:
        raise UnfitError("it does not cut text into words")
    byte_level = stages.pop()
    if byte_level.get("type") != "ByteLevel" or byte_level.get("add_prefix_space"):
        raise UnfitError("its words are no bytes, or a space is put in front of them")
    if byte_level.get("use_regex", True):
        if stages:
            raise UnfitError("its words are cut twice")
        return Cut(k.GPT2)
    cut = _CUTS.get(tuple(str(stage.get("pattern", {}).get("Regex")) for stage in stages))
    if cut is None or any(stage.get("behavior") != "Isolated" or stage.get("invert") for stage in stages):
        raise UnfitError("its words are cut by an expression that is not known here")
    return cut


def normalizes_to_nfc(tokenizer: Tokenizer) -> bool:
    """Else the text is taken as it is. Raises UnfitError where something else is done with it."""
    stages = _stages(tokenizer.normalizer, "normalizers")
    if stages not in ([], [{"type": "NFC"}]):
        raise UnfitError("it normalizes text")
    return bool(stages)


def _stages(component: Any, parts: str) -> list[dict[str, Any]]:
    """What a normalizer or pre-tokenizer does, one after the other."""
    if component is None:
        return []
    state: dict[str, Any] = json.loads(component.__getstate__())
    return list(state[parts]) if state.get("type") == "Sequence" else [state]
