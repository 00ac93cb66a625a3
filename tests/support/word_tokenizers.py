"""Small tokenizers of bytes, one for every way of cutting words that is known."""

from __future__ import annotations

from collections.abc import Callable

from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

CORPUS = [
    "the quick brown fox's jumps over the lazy dog",
    "don't stop; naïve café 東京 12345\n\n",
    "I'LL  b",
] * 9
LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN = LLAMA_3.replace("{1,3}", "")
QWEN_3_5 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT_OSS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
MISTRAL = GPT_OSS.replace("(?i:'s|'t|'re|'ve|'m|'ll|'d)?", "").replace("{1,3}", "")
DEEPSEEK = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
    "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
)
SPECIALS = ["<|im_start|>", "<|im_end|>", "<think>", "<\uff5cé\uff5c>"]


def byte_level(pre_tokenizer: object, normalizer: object = None, *, merges: int = 420) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(ignore_merges=normalizer is None))
    tokenizer.pre_tokenizer = pre_tokenizer  # type: ignore[assignment]
    if normalizer is not None:
        tokenizer.normalizer = normalizer  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(
        vocab_size=merges,
        special_tokens=[AddedToken(each, special=True, normalized=False) for each in SPECIALS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def split_by(*expressions: str) -> object:
    return pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(expression), "isolated") for expression in expressions),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def as_gpt2() -> Tokenizer:
    return byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False))


def as_llama_3() -> Tokenizer:
    return byte_level(split_by(LLAMA_3))


def as_qwen() -> Tokenizer:
    return byte_level(split_by(QWEN), normalizers.NFC())


def as_qwen_3_5() -> Tokenizer:
    return byte_level(split_by(QWEN_3_5), normalizers.NFC())


def as_gpt_oss() -> Tokenizer:
    return byte_level(split_by(GPT_OSS))


def as_mistral() -> Tokenizer:
    return byte_level(split_by(MISTRAL))


def as_deepseek() -> Tokenizer:
    return byte_level(split_by(*DEEPSEEK), normalizers.Sequence([]))


def with_bracketed_tokens() -> Tokenizer:
    """Some added tokens are not matched where segments are cut, and one takes the space behind it."""
    tokenizer = as_llama_3()
    tokenizer.add_tokens([AddedToken("[INST]", normalized=False), AddedToken("dog", normalized=True)])
    tokenizer.add_tokens([AddedToken("<|end|>", rstrip=True, normalized=False)])
    return tokenizer


CUTS: list[Callable[[], Tokenizer]] = [
    as_gpt2,
    as_llama_3,
    as_qwen,
    as_qwen_3_5,
    as_gpt_oss,
    as_mistral,
    as_deepseek,
]
MAKERS = [*CUTS, with_bracketed_tokens]


BITS = [
    "'s", "'S", "'ll", "'LL", "'re", "'x", "'", "'\u017f", "''t", " ", "  ", "\t", "\n", "\r\n", "\n\n ", "\u00a0",
    "\u2003", "\x1c", "\x85", "a", "Zebra", "don", "dog", " [INST]", "é", "e\u0301", "ß", "東京", "ﬁ", "ª",
    "Ǆ", "ǅ", "ʰ", "ABc", "aB", "Éa", "漢A", "A漢", "/", "/\n/", "かな", "カー", "゛", "・",
    "1", "12345", "½", "٣", "一",
    ".", "...", "!?", "{", "_", "🦊", "👩‍👩‍👧", "\u0301", "\u200b", "\x00", "\U0003fffd", "\u0378",
]  # fmt: skip
