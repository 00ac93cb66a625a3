"""Tokens by words are the library's own, for every way of cutting words that is known, known words or new."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers
from word_tokenizers import (
    BITS,
    CUTS,
    MAKERS,
    SPECIALS,
    as_gpt2,
    as_llama_3,
    as_qwen,
    split_by,
    with_bracketed_tokens,
)

from conductor.placement import Tokens
from router import PromptTokenizer
from router.inference import Endpoint, parse_inference
from router.segments import segmentation_of
from router.word_tokens import UnfitError, WordTokens, word_tokens_of
from simulator.emulator.tokens import TOKENIZER_FOLDER


def encoder(tokenizer: Tokenizer) -> Callable[[str], Tokens]:
    def encode(text: str) -> Tokens:
        return np.array(tokenizer.encode(text, add_special_tokens=False).ids, np.uint32)

    return encode


def by_words(tokenizer: Tokenizer, max_words: int = 1 << 12) -> WordTokens:
    return word_tokens_of(tokenizer, segmentation_of(tokenizer, encoder(tokenizer)), max_words=max_words)


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


@pytest.mark.parametrize("maker", [as_llama_3, with_bracketed_tokens], ids=lambda maker: maker.__name__)
def test_added_tokens_are_found_wherever_they_stand(maker: Callable[[], Tokenizer]) -> None:
    tokenizer = maker()
    words, encode = by_words(tokenizer), encoder(tokenizer)
    for behind in range(200):
        for special in SPECIALS:
            text = "x " * (behind // 2) + "<" * (behind % 2) + special + " fox" * (behind % 40)
            found = words.tokens(text)
            assert found is not None
            assert found.tolist() == encode(text).tolist()
    for behind in range(150):
        for left in ("[INST]", "dog") if maker is with_bracketed_tokens else ():
            assert words.tokens("x" * behind + left + " fox" * 40) is None


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
