"""Tokens put together from cached segments are those of direct tokenization, whatever the tokenizer."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from router import PromptTokenizer, known_beginnings, token_cache
from router.chat_template import ChatTemplate
from router.inference import Endpoint, parse_inference
from router.known_beginnings import KnownBeginnings
from router.segments import IndivisibleError, segmentation_of

CORPUS = ["the quick brown fox jumps over the lazy dog", "don't stop; naïve café 東京 12345", "<s> a | b"] * 9
SPLIT = (
    r"(?i:'s|'t|'re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def special(*contents: str, **flags: bool) -> list[AddedToken]:
    return [AddedToken(content, special=True, normalized=False, **flags) for content in contents]


def trained(tokenizer: Tokenizer, tokens: list[AddedToken], *, byte_level: bool = False) -> Tokenizer:
    alphabet = pre_tokenizers.ByteLevel.alphabet() if byte_level else []
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=tokens, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def as_llama_3() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    names = ["<|begin_of_text|>", "<|im_start|>", "<|im_end|>", "<|im_end|>x", "<|im_end|><think>", "<think>"]
    trained(tokenizer, special(*names), byte_level=True)
    bos = ("<|begin_of_text|>", tokenizer.token_to_id("<|begin_of_text|>"))
    template = processors.TemplateProcessing(single=f"{bos[0]} $A", special_tokens=[bos])
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    return tokenizer


def with_prefix_space() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    return trained(tokenizer, special("<|im_start|>", "<|im_end|>"), byte_level=True)


def as_llama_2() -> Tokenizer:
    """A prefix space by a normalizer, no pre-tokenizer, ``[INST]`` in plain text."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trained(tokenizer, special("<unk>", "<s>", "</s>"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    return tokenizer


def with_metaspace_first() -> Tokenizer:
    """A prefix space only where the text begins; full-width letters become the text of a special token."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    trainer = trainers.UnigramTrainer(
        vocab_size=120, special_tokens=special("<unk>", "<s>", "[INST]", "[/INST]"), unk_token="<unk>"
    )
    trainer.show_progress = False
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def with_greedy_tokens() -> Tokenizer:
    """Added tokens that take the space around them, that must be words, and that are normalized."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Strip(), normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    trained(tokenizer, [*special("<unk>", "<s>"), *special("<|end|>", "<|user|>", rstrip=True)])
    tokenizer.add_tokens(
        [
            *special("<mask>", lstrip=True),
            *special("<word", "fox", single_word=True),
            AddedToken("Dog", normalized=True),
            *special("\n\n"),
        ]
    )
    return tokenizer


def as_bert() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokens = special("[UNK]", "[CLS]", "[SEP]")
    trainer = trainers.WordPieceTrainer(vocab_size=150, special_tokens=tokens, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    return tokenizer


MAKERS: list[Callable[[], Tokenizer]] = [
    as_llama_3,
    with_prefix_space,
    as_llama_2,
    with_metaspace_first,
    with_greedy_tokens,
    as_bert,
]


@pytest.fixture(scope="module", params=MAKERS, ids=lambda maker: maker.__name__)
def tokenizer(request: pytest.FixtureRequest) -> Iterator[Tokenizer]:
    yield request.param()


FULL_WIDTH = "\uff1c\uff53\uff1e"  # NFKC makes <s> of it
WORDS = ["the fox", "Dog", "fox", "x", "12", "é", "e\u0301", "東", "🦊", "▁", FULL_WIDTH, "\u200b", "\x00"]
PLAIN = ["", " ", "  ", "\n", "\n\n", "<", "<|", "<s", "|>", "[", "[INST", "<word", *WORDS]


def texts(specials: list[str]) -> st.SearchStrategy[str]:
    anything = st.text(st.characters(codec="utf-8"), max_size=4)
    pieces = st.one_of(st.sampled_from(specials), st.sampled_from(PLAIN), anything)
    return st.lists(pieces, max_size=14).map("".join)


def test_tokens_are_those_of_direct_tokenization(tokenizer: Tokenizer) -> None:
    oracle = Tokenizer.from_str(tokenizer.to_str())
    small, large = PromptTokenizer(tokenizer, cache_bytes=3_000), PromptTokenizer(tokenizer)
    assert small.cache_state().off is None
    added = [token.content for token in oracle.get_added_tokens_decoder().values()]

    @settings(max_examples=100, deadline=None)
    @given(texts(added), texts(added), st.booleans())
    def check(text: str, more: str, add: bool) -> None:
        for grown in (text, text + more, text + more + text):
            expected = oracle.encode(grown, add_special_tokens=add).ids
            assert small.encode(grown, add_special_tokens=add).tolist() == expected
            assert large.encode(grown, add_special_tokens=add).tolist() == expected
        assert 0 <= small.cache_state().kept_bytes <= 3_000

    check()
    assert small.cache_state().known_characters > 0


CONTENTS = st.text("<|a> [", min_size=1, max_size=4)
FLAGS = st.fixed_dictionaries(
    {name: st.booleans() for name in ("lstrip", "rstrip", "single_word", "normalized")}
)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(CONTENTS, FLAGS), min_size=1, max_size=6, unique_by=lambda token: token[0]),
    st.lists(st.text("<|a> [b", max_size=12), min_size=1, max_size=4),
)
def test_any_added_tokens(added: list[tuple[str, dict[str, bool]]], prompts: list[str]) -> None:
    """Also those that overlap, contain each other or take their neighbours' space."""
    tokenizer = Tokenizer(models.BPE({character: at for at, character in enumerate("<|a>▁[b")}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.add_tokens([AddedToken(content, special=True, **flags) for content, flags in added])
    oracle = Tokenizer.from_str(tokenizer.to_str())
    cached = PromptTokenizer(tokenizer)
    try:
        segmentation = segmentation_of(tokenizer, lambda text: np.array(oracle.encode(text).ids, np.uint32))
        separators = sorted(segmentation.separators)
    except IndivisibleError:
        separators = []
    except BaseException as error:
        assert type(error).__name__ == "PanicException"
        separators = []
    joined = "".join(content for content, _ in added).join(prompts)
    for text in [*prompts, joined]:
        try:
            expected = oracle.encode(text).ids
        except BaseException as error:
            assert type(error).__name__ == "PanicException"  # tokenizers fails where space is taken twice
            continue
        assert cached.encode(text, add_special_tokens=False).tolist() == expected
        for separator in separators:
            split = segmentation.by(separator, tokenizer.token_to_id(separator)).split(text)
            assert "".join(split) == text
            assert [token for segment in split for token in oracle.encode(segment).ids] == expected


CHATML = """{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}
{{- '<|im_start|>assistant\\n' }}"""
BY_ANSWERS = """{%- for m in messages %}{% if m.role == 'user' %}{{ '<|im_end|>x' + m.content + '<|im_start|>' }}
{%- else %}{{ m.content + '<|im_end|>' }}{% endif %}{% endfor %}"""


@pytest.mark.parametrize(
    "template", [CHATML, BY_ANSWERS, "no token of its own", "{{ raise_exception('no') }}"]
)
@pytest.mark.parametrize("maker", [as_llama_3, with_greedy_tokens])
def test_chats_are_split_where_their_template_begins_a_turn(
    maker: Callable[[], Tokenizer], template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens are the same wherever they are split, also of text that is no chat."""
    monkeypatch.setattr(token_cache, "LONG_CHARACTERS", 0)
    monkeypatch.setattr(known_beginnings, "_FEWEST_SEGMENTS", 1)
    tokenizer = maker()
    oracle = Tokenizer.from_str(tokenizer.to_str())
    chat_template = ChatTemplate(template, {})
    small = PromptTokenizer(tokenizer, chat_template, cache_bytes=3_000)
    large = PromptTokenizer(tokenizer, chat_template)
    added = [token.content for token in oracle.get_added_tokens_decoder().values()]

    @settings(max_examples=60, deadline=None)
    @given(texts(added), texts(added))
    def check(text: str, more: str) -> None:
        for grown in (text, text + more, text + more + text, text + text):
            expected = oracle.encode(grown, add_special_tokens=False).ids
            assert small.encode(grown, add_special_tokens=False).tolist() == expected
            assert large.encode(grown, add_special_tokens=False).tolist() == expected
        assert 0 <= small.cache_state().kept_bytes <= 3_000

    check()


@pytest.mark.parametrize("cache_bytes", [20_000, 1 << 28])
def test_long_chats_that_grow_branch_and_are_cut(cache_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On several threads; some begin alike, some were never seen, some go on in the middle of a message."""
    monkeypatch.setattr(token_cache, "LONG_CHARACTERS", 200)
    tokenizer = as_llama_3()
    oracle = Tokenizer.from_str(tokenizer.to_str())
    cached = PromptTokenizer(tokenizer, ChatTemplate(CHATML, {}), cache_bytes=cache_bytes)

    def grow(seed: int) -> int:
        generator = random.Random(seed)
        chats = [["<|im_start|>system\nbe brief<|im_end|>\n"] for _ in range(3)]
        long = 0
        for turn in range(60):
            chat = generator.choice(chats)
            if generator.random() < 0.2:
                del chat[generator.randrange(1, len(chat) + 1) :]
            said = f"{generator.choice(('the fox', 'dog', ''))} {turn % 7}"
            chat.append(f"<|im_start|>user\n{said}<|im_end|>\n")
            text = "".join(chat) + "<|im_start|>assistant\n"
            expected = oracle.encode(text, add_special_tokens=False).ids
            assert cached.encode(text, add_special_tokens=False).tolist() == expected
            chat.append(f"<|im_start|>assistant\n{said}, {said}<|im_end|>\n")
            long += len(text) > 400
        return long

    with ThreadPoolExecutor(4) as threads:
        assert min(threads.map(grow, range(4))) > 10
    assert 0 < cached.cache_state().kept_bytes <= cache_bytes


def test_beginnings_of_chats_are_known_up_to_where_they_differ() -> None:
    known = KnownBeginnings("<", 100_000)
    segments = [f"<{number}" for number in range(10)]
    text = "".join(segments)
    name = known.name_of(text)
    assert name == known.name_of("<0<1<2<3<4") == "<0<1"
    assert known.name_of("<0<1<") is known.name_of("<0") is known.name_of("<0123456789<1<2") is None
    assert known.find(name, text) is None
    known.keep(name, text, b"ab" * 10, None, segments, [b"ab"] * 10)
    for other, same in [
        ("<0<1<2<3", 4),
        ("<0<1<2<3x<4", 3),
        ("<0<1<2x", 2),
        ("<0<1<2<3<4<5<6<7<8<", 9),
        (text + "<10", 9),  # the last one might have gone on
    ]:
        beginning = known.find(name, other + "<new")
        assert beginning is not None
        assert other.startswith("".join(segments[:same])) and beginning.characters == 2 * same
        assert bytes(beginning.token_bytes) == b"ab" * same
    assert known.find(name, "<0x<1<2") is known.find(name, "x<0<1") is None
    text = "<0<1<2<3<4<5<6<new<12<13"
    beginning = known.find(name, text)
    known.keep(name, text, b"ab" * 7 + b"cdef", beginning, ["<new<12", "<13"], [b"cd", b"ef"])
    beginning = known.find(name, text)
    assert beginning is not None
    assert (beginning.characters, bytes(beginning.token_bytes)) == (21, b"ab" * 7 + b"cd")
    for number in range(200):
        chat = [f"<{number}-{at}" for at in range(9)]
        known.keep(chat[0], "".join(chat), b"a" * 9, None, chat, [b"a"] * 9)
        assert 0 < known.kept_bytes <= 100_000
    assert known.find(name, "<0<1<2<3<4") is None and known.find("<199-0", "<199-0<199-1<199-2<") is not None


@pytest.mark.parametrize(
    ("template", "separator"), [(CHATML, "<|im_start|>"), (BY_ANSWERS, "<|im_start|>"), ("nothing", None)]
)
def test_a_growing_chat_costs_its_new_turn(template: str, separator: str | None) -> None:
    tokenizer = as_llama_3()
    cached = PromptTokenizer(tokenizer, ChatTemplate(template, {}))
    assert cached._cache is not None
    by_separator = cached._cache._by_separator
    assert (by_separator and by_separator.separator) == separator
    messages: list[dict[str, str]] = []
    for turn in range(9):
        messages.append({"role": "user", "content": f"turn {turn} the quick brown fox"})
        before = cached.cache_state().new_characters
        cached.tokens(parse_inference(Endpoint.CHAT, orjson.dumps({"model": "m", "messages": messages})))
        new = cached.cache_state().new_characters - before
        messages.append({"role": "assistant", "content": f"{turn} jumps over the lazy dog"})
        said = sum(len(message["content"]) for message in messages[-3:-1])
        assert new <= said + 2 * len("<|im_start|>assistant\n<|im_end|>\n")


class Untouched:
    """A pre-tokenizer written in Python."""

    def pre_tokenize(self, text: object) -> None:
        pass


def in_python(tokenizer: Tokenizer) -> None:
    tokenizer.pre_tokenizer = pre_tokenizers.PreTokenizer.custom(Untouched())


def at_random(tokenizer: Tokenizer) -> None:
    tokenizer.model.dropout = 0.5


def truncating(tokenizer: Tokenizer) -> None:
    tokenizer.enable_truncation(8)


@pytest.mark.parametrize(
    ("change", "reason"),
    [(in_python, "written in Python"), (at_random, "random"), (truncating, "truncates")],
)
def test_what_cannot_be_put_together_is_not_cached(change: Callable[[Tokenizer], None], reason: str) -> None:
    tokenizer = as_llama_3()
    change(tokenizer)
    state = PromptTokenizer(tokenizer).cache_state()
    assert state.off is not None and reason in state.off


def test_without_usable_added_tokens_nothing_is_cached() -> None:
    plain = Tokenizer(models.WordLevel({"a": 0, "?": 1}, unk_token="?"))
    for flags in ({}, {"normalized": True}, {"lstrip": True}, {"single_word": True}):
        if flags:
            plain.add_special_tokens([AddedToken("<s>", **{"normalized": False, **flags})])
        cached = PromptTokenizer(plain)
        assert "no added tokens" in (cached.cache_state().off or "")
        assert cached.encode("a", add_special_tokens=False).tolist() == [0]
    assert "0 bytes" in (PromptTokenizer(as_bert(), cache_bytes=0).cache_state().off or "")


def test_only_the_new_turn_is_tokenized() -> None:
    cached = PromptTokenizer(as_llama_3())
    turns = [f"<|im_start|>user\nturn {turn} the quick brown fox<|im_end|>\n" for turn in range(20)]
    for end in range(1, len(turns) + 1):
        before = cached.cache_state()
        cached.encode("".join(turns[:end]), add_special_tokens=False)
        after = cached.cache_state()
        assert after.new_characters - before.new_characters <= len(turns[end - 1])
        assert after.known_characters - before.known_characters >= len("".join(turns[: end - 1]))


def test_least_recently_used_text_makes_room() -> None:
    cached = PromptTokenizer(as_llama_3(), cache_bytes=5_000)

    def new_characters(text: str) -> int:
        before = cached.cache_state().new_characters
        cached.encode(text, add_special_tokens=False)
        return cached.cache_state().new_characters - before

    system, turns = "<|im_start|>system", [f"<|im_start|>{turn} the lazy dog" for turn in range(50)]
    new_characters(system)
    for turn in turns:
        assert new_characters(turn) == len(turn)
        assert new_characters(system) == 0
    assert new_characters(turns[-1]) == 0
    assert new_characters(turns[0]) == len(turns[0])
    longer_than_the_cache = "<|im_start|>" + "the fox " * 2_000
    assert new_characters(longer_than_the_cache) == new_characters(longer_than_the_cache) > 0
    assert new_characters(system) == 0
