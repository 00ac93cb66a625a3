"""Tokens by words are the library's own, for every way of cutting words that is known, known words or new."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from conductor.placement import Tokens
from router import PromptTokenizer
from router.inference import Endpoint, parse_inference
from router.segments import segmentation_of
from router.word_tokens import UnfitError, WordTokens, word_tokens_of
from simulator.emulator.tokens import TOKENIZER_FOLDER

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


def encoder(tokenizer: Tokenizer) -> Callable[[str], Tokens]:
    def encode(text: str) -> Tokens:
        return np.array(tokenizer.encode(text, add_special_tokens=False).ids, np.uint32)

    return encode


def by_words(tokenizer: Tokenizer, max_words: int = 1 << 12) -> WordTokens:
    return word_tokens_of(tokenizer, segmentation_of(tokenizer, encoder(tokenizer)), max_words=max_words)


BITS = [
    "'s", "'S", "'ll", "'LL", "'re", "'x", "'", "'\u017f", "''t", " ", "  ", "\t", "\n", "\r\n", "\n\n ", "\u00a0",
    "\u2003", "\x1c", "\x85", "a", "Zebra", "don", "dog", " [INST]", "é", "e\u0301", "ß", "東京", "ﬁ", "ª",
    "Ǆ", "ǅ", "ʰ", "ABc", "aB", "Éa", "漢A", "A漢", "/", "/\n/", "かな", "カー", "゛", "・",
    "1", "12345", "½", "٣", "一",
    ".", "...", "!?", "{", "_", "🦊", "👩‍👩‍👧", "\u0301", "\u200b", "\x00", "\U0003fffd", "\u0378",
]  # fmt: skip


def texts() -> st.SearchStrategy[str]:
    anything = st.text(st.characters(codec="utf-8"), max_size=4)
    bits = st.one_of(st.sampled_from(BITS), st.sampled_from([*SPECIALS, "<|end|>", "<|", ">"]), anything)
    return st.lists(bits, max_size=16).map("".join)


@pytest.mark.parametrize("maker", MAKERS, ids=lambda maker: maker.__name__)
def test_tokens_are_the_librarys(maker: Callable[[], Tokenizer]) -> None:
    tokenizer = maker()
    encode = encoder(tokenizer)
    words, few = by_words(tokenizer), by_words(tokenizer, max_words=8)
    answered = 0

    @settings(max_examples=200, deadline=None)
    @given(texts())
    def check(text: str) -> None:
        nonlocal answered
        for table in (words, few):
            tokens = table.tokens(text)
            if tokens is not None:
                answered += 1
                assert tokens.tolist() == encode(text).tolist()

    check()
    assert answered > 100


@pytest.mark.parametrize("maker", CUTS, ids=lambda maker: maker.__name__)
def test_every_pair_of_ascii_characters_is_cut_as_the_library_does(maker: Callable[[], Tokenizer]) -> None:
    tokenizer = maker()
    words, encode = by_words(tokenizer), encoder(tokenizer)
    characters = [chr(code) for code in range(128)]
    for first in characters:
        text = "".join(f"{first}{second}a{second}{first}" for second in characters)
        tokens = words.tokens(text)
        assert tokens is not None
        assert tokens.tolist() == encode(text).tolist()


def of_the_emulator() -> Tokenizer:
    return Tokenizer.from_file(str(TOKENIZER_FOLDER / "tokenizer.json"))


@pytest.mark.parametrize("maker", [as_gpt2, as_qwen, of_the_emulator], ids=lambda maker: maker.__name__)
def test_new_words_merge_as_the_library_merges_them(maker: Callable[[], Tokenizer]) -> None:
    tokenizer = maker()
    words, encode = by_words(tokenizer), encoder(tokenizer)
    random = np.random.default_rng(5)
    common = [chr(letter) for letter in range(ord("a"), ord("z") + 1)]
    for alphabet in (common, common[:3], ["the", "er", "in", "q", "u"], ["東", "京", "é", "x"]):
        for length in (1, 2, 5, 20, 40):
            text = " ".join("".join(random.choice(alphabet, length)) for _ in range(50))
            for _ in range(2):  # new, and known
                tokens = words.tokens(text)
                assert tokens is not None
                assert tokens.tolist() == encode(text).tolist()


@pytest.mark.parametrize("ignores", [True, False])
def test_a_word_that_is_a_token_need_not_be_what_its_merges_make(ignores: bool) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {
        letter: number for number, letter in enumerate([*alphabet, "ab", "bc", "abc", "abcd", "xyz"])
    }
    merges = [("b", "c"), ("a", "b"), ("ab", "c")]  # by which `abc` is a, bc
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=ignores))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True, normalized=False)])
    words = by_words(tokenizer, max_words=2)
    for word, whole in (("abc", 1), ("abcd", 1), ("xyz", 1), ("ab", 1), ("abcab", 3), ("xyzz", 4)):
        for _ in range(2):
            tokens = words.tokens(word)
            assert tokens is not None
            assert tokens.tolist() == encoder(tokenizer)(word).tolist()
            if ignores:
                assert len(tokens) == whole


@pytest.mark.parametrize("text", ["x" * 300, "\ud800", "e\u0301", "I'\u017f", "\u0378"])
def test_what_is_not_sure_is_left_to_the_library(text: str) -> None:
    assert by_words(as_qwen()).tokens(text) is None


def test_a_vocabulary_larger_than_the_table_is_tokenized_all_the_same() -> None:
    tokenizer = as_llama_3()
    words = by_words(tokenizer, max_words=64)
    text = " ".join(f"{number:x}z" for number in range(40))
    for _ in range(3):
        tokens = words.tokens(text)
        assert tokens is not None
        assert tokens.tolist() == encoder(tokenizer)(text).tolist()


@pytest.mark.parametrize("falls_back", [True, False])
def test_a_vocabulary_that_lacks_bytes_is_left_to_the_library_where_it_does(falls_back: bool) -> None:
    letters = {letter: number for number, letter in enumerate("abc")}
    fallback = {f"<0x{byte:02X}>": 100 + byte for byte in range(256)} if falls_back else {}
    tokenizer = Tokenizer(models.BPE({**letters, **fallback}, [], byte_fallback=falls_back))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True, normalized=False)])
    words = by_words(tokenizer)
    known = words.tokens("abc<|end|>cab")
    assert known is not None
    assert known.tolist() == encoder(tokenizer)("abc<|end|>cab").tolist()
    assert words.tokens("abc é  abc") is None


def test_words_longer_than_the_table_are_tokenized_all_the_same() -> None:
    tokenizer = as_llama_3()
    words = by_words(tokenizer, max_words=2)
    text = f"{'a' * 250} {'b' * 251} {'c' * 252}"
    for _ in range(3):
        tokens = words.tokens(text)
        assert tokens is None or tokens.tolist() == encoder(tokenizer)(text).tolist()
    one = words.tokens("d" * 256)
    assert one is not None
    assert one.tolist() == encoder(tokenizer)("d" * 256).tolist()


def test_threads_share_the_table() -> None:
    tokenizer = as_llama_3()
    words, encode = by_words(tokenizer, max_words=256), encoder(tokenizer)
    lines = [" ".join(f"{(seed * 977 + place) % 1009:x}y" for place in range(60)) for seed in range(40)]
    wanted = [encode(line).tolist() for line in lines]
    wrong: list[str] = []

    def tokenize(offset: int) -> None:
        for place in range(len(lines)):
            at = (place + offset) % len(lines)
            tokens = words.tokens(lines[at])
            if tokens is None or tokens.tolist() != wanted[at]:
                wrong.append(lines[at])

    threads = [threading.Thread(target=tokenize, args=(offset,)) for offset in (0, 7, 19)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_text_of_many_scripts_is_classified_block_by_block() -> None:
    tokenizer = as_gpt2()
    words, encode = by_words(tokenizer), encoder(tokenizer)
    text = "".join(f"{chr(first)}{chr(first + 40)} " for first in range(0x100, 0xD000, 0x100))
    tokens = words.tokens(text.replace("\u0378", ""))
    if tokens is not None:  # none of the characters is unassigned
        assert tokens.tolist() == encode(text).tolist()
    for first in range(0x4E00, 0x9F00, 0x100):
        assert words.tokens(chr(first)) is not None


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda each: setattr(each, "normalizer", normalizers.Lowercase()), "normalizes"),
        (lambda each: setattr(each, "pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=True)), "space"),
        (lambda each: setattr(each, "pre_tokenizer", split_by(r"\p{L}+")), "expression"),
        (lambda each: setattr(each, "pre_tokenizer", pre_tokenizers.Whitespace()), "no bytes"),
        (lambda each: each.add_tokens([AddedToken(f"[{n}]", normalized=False) for n in range(20)]), "depend"),
    ],
)  # fmt: skip
def test_other_tokenizers_are_refused(spoil: Callable[[Tokenizer], object], why: str) -> None:
    tokenizer = as_llama_3()
    segmentation = segmentation_of(tokenizer, encoder(tokenizer))
    spoil(tokenizer)
    with pytest.raises(UnfitError, match=why):
        word_tokens_of(tokenizer, segmentation)


def test_long_text_is_tokenized_at_once_by_its_words() -> None:
    tokenizer = PromptTokenizer(as_llama_3())

    def at_once(text: str) -> Tokens | None:
        return tokenizer.tokens_if_known(parse_inference(Endpoint.COMPLETIONS, body(text)), 1_000)

    def body(text: str) -> bytes:
        return json.dumps({"model": "m", "prompt": text, "add_special_tokens": False}).encode()

    unheard = " ".join(f"w{number}" for number in range(1_000))
    assert len(unheard) > 4_000
    for text in (unheard, "the quick brown fox jumps over the lazy dog. " * 100):
        found = at_once(text)
        assert found is not None
        assert found.tolist() == encoder(as_llama_3())(text).tolist()
        assert at_once(f"!{text}" * 10) is None  # even so it takes time
