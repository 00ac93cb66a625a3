"""Chats read by compiled code: what comes out is what the libraries make of the body, or nothing."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from word_tokenizers import BITS, SPECIALS, as_gpt2, as_llama_3, as_qwen, with_bracketed_tokens

from cache_index import sequence_hashes
from router import PromptTokenizer
from router.chat_template import ChatTemplate
from router.errors import RequestError
from router.inference import Endpoint, InferenceRequest, parse_inference
from router.plain_chats import PlainChat, PlainChats, PlainPrompts
from router.plain_chats.reader import AT_ONCE_BYTES
from router.segments import segmentation_of
from router.tokens import TokenService
from simulator.emulator.tokens import TOKENIZER_FOLDER

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TRIMMED = CHATML.replace("message.content", "message['content'] | trim")
THINKING = CHATML.replace(
    "{{ message.content }}",
    "{{ message.content.split('</think>')[-1] if '</think>' in message.content else message.content }}",
)
ONLY_THE_LAST = (
    "{% for message in messages %}<|im_start|>{{ 'old ' if not loop.last }}{{ message.role }}\n"
    "{{ message.content }}<|im_end|>{% endfor %}<think>é"
)
ONLY_IF_SAID = CHATML.replace(
    "{{ message.content }}", "{% if message.content %}{{ message.content | trim }}{% endif %}"
)
WITH_A_BLANK_CHECK = "{% if messages[0].content %}S{% endif %}" + CHATML.replace(
    "{{ message.content }}", "{{ message.content if not loop.first }}"
)
SHOUTED = CHATML.replace("message.content", "message.content | upper")
COMBINATIONS: list[tuple[Callable[[], Tokenizer], str]] = [
    (as_llama_3, CHATML),
    (as_qwen, TRIMMED),
    (as_gpt2, THINKING),
    (with_bracketed_tokens, CHATML),
    (as_llama_3, ONLY_THE_LAST),
    (as_qwen, ONLY_IF_SAID),
    (as_llama_3, WITH_A_BLANK_CHECK),
]


@lru_cache
def tokenizer_of(maker: Callable[[], Tokenizer], template: str) -> PromptTokenizer:
    return PromptTokenizer(maker(), ChatTemplate(template, {}))


def reader_of(tokenizer: PromptTokenizer, *, max_bytes: int = 1 << 20) -> PlainChats:
    return PlainChats(lambda model: None if model == "unknown" else tokenizer.plain, max_bytes=max_bytes)


def check(reader: PlainChats, tokenizer: PromptTokenizer, body: bytes) -> PlainChat | None:
    """What is read is what the libraries make of it."""
    chat = reader.read(body if len(body) % 2 else memoryview(b"what comes before" + body)[17:])
    if chat is None:
        return None
    expected = parse_inference(Endpoint.CHAT, body)
    request = chat.request
    assert request.document == expected.document
    for name in ("endpoint", "model", "stream", "max_output_tokens", "cache_salt"):
        assert getattr(request, name) == getattr(expected, name)
    tokens = chat.tokens if chat.tokens is not None else reader.tokenize(body)
    if tokens is not None:
        assert tokens.tolist() == tokenizer.tokens(expected).tolist()
    return chat


def contents() -> st.SearchStrategy[str]:
    anything = st.text(st.characters(codec="utf-8"), max_size=4)
    bits = st.one_of(st.sampled_from([*BITS, "</think>", '"', "\\", "\u3000"]), anything)
    rarely = st.sampled_from([*SPECIALS, "<|end|>", "<|", "<", ">"])
    return st.lists(st.one_of(bits, bits, bits, rarely), max_size=8).map("".join)


ROLES = st.sampled_from(["system", "user", "assistant"])
MESSAGES = st.lists(
    st.tuples(ROLES, contents()).map(lambda pair: {"role": pair[0], "content": pair[1]}),
    min_size=1,
    max_size=5,
)
FURTHER = st.fixed_dictionaries(
    {},
    optional={
        "stream": st.booleans(),
        "max_tokens": st.integers(0, 10**16),
        "max_completion_tokens": st.integers(0, 2),
        "n": st.integers(0, 2),
        "temperature": st.floats(0, 2),
        "seed": st.integers(-(10**10), 10**10),
        "stop": st.none() | contents() | st.lists(contents(), max_size=2),
        "logit_bias": st.dictionaries(st.text(max_size=3), st.integers() | st.floats(), max_size=2),
        "metadata": st.recursive(
            st.none() | st.booleans() | st.floats() | st.text(max_size=3),
            lambda inner: (
                st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=2), inner, max_size=2)
            ),
            max_leaves=5,
        ),
    },
)


@st.composite
def bodies(draw: st.DrawFn) -> bytes:
    fields = list({"model": "m", "messages": draw(MESSAGES), **draw(FURTHER)}.items())
    document = dict(draw(st.permutations(fields)))
    text = json.dumps(
        document,
        ensure_ascii=draw(st.booleans()),
        indent=draw(st.sampled_from([None, 0, 2])),
        separators=draw(st.sampled_from([None, (",", ":"), (" ,\t", "\r\n: ")])),
    )
    return text.encode("utf-8", "surrogatepass")


@pytest.mark.parametrize(("maker", "template"), COMBINATIONS)
def test_what_is_read_is_what_the_libraries_make_of_it(maker: Callable[[], Tokenizer], template: str) -> None:
    tokenizer = tokenizer_of(maker, template)
    reader = reader_of(tokenizer)
    read = []

    @settings(max_examples=300, deadline=None)
    @given(bodies())
    def run(body: bytes) -> None:
        read.append(check(reader, tokenizer, body) is not None)

    run()
    assert sum(read) >= 10  # else it shows nothing


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    body = bytearray(draw(bodies()))
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(body) - 1))
        piece = draw(
            st.sampled_from([b"", b'"', b"\\", b"{", b"}", b"[", b"]", b",", b":", b"0", b"-", b"\\u", b"null",
                             b" ", b"\\ud800", b"\x00", b"\xff", b"\xc3", b"\xed\xa0\x80", b"1e5", b"/"])
        )  # fmt: skip
        body[at : at + draw(st.integers(0, 3))] = piece
    return bytes(body) or b"{"


@settings(max_examples=1_500, deadline=None)
@given(damaged())
def test_nothing_is_read_that_the_libraries_refuse(body: bytes) -> None:
    tokenizer = tokenizer_of(as_llama_3, CHATML)
    chat = reader_of(tokenizer).read(body)
    if chat is not None:
        document = orjson.loads(body)  # which raises nothing
        expected = parse_inference(Endpoint.CHAT, body)
        assert (chat.request.model, chat.request.stream) == (document["model"], expected.stream)
        assert chat.request.max_output_tokens == expected.max_output_tokens
        assert chat.tokens is not None
        assert chat.tokens.tolist() == tokenizer.tokens(expected).tolist()


@pytest.mark.parametrize(
    "body",
    [
        b"", b" ", b"{", b"[]", b"null", b"{}", b'{"model":"m"}', b'{"model":"m","messages":[]}',
        b'{"messages":[{"role":"user","content":"a"}]}',
        b'{"model":"","messages":[{"role":"user","content":"a"}]}',
        b'{"model":"m","model":"n","messages":[{"role":"user","content":"a"}]}',
        b'{"model":"m","messages":[{"role":"user","content":"a"}],"messages":[{"role":"user","content":"b"}]}',
        b'{"model":"m","messages":[{"role":"user","content":"a"}]}x',
        b'{"model":"m","messages":[{"role":"user","content":"a"}],}',
        b'{"model":"m","messages":[{"role":"user","content":"a"},]}',
        b'{"model":"m","messages":[{"role":"user","content":"a",}]}',
        b'{"model":"m","messages":[{"role":"user","content":"\\ud800"}]}',
        b'{"model":"m","messages":[{"role":"user","content":"\\udc00\\ud800"}]}',
        b'{"model":"m","messages":[{"role":"user","content":"\xed\xa0\x80"}]}',
        b'{"model":"m","messages":[{"role":"user","content":"\xf4\x90\x80\x80"}]}',
        b'{"model":"m","messages":[{"role":"user","content":"\xc0\xaf"}]}',
        b'{"model":"m","messages":[{"role":"user","content":"a\nb"}]}',
        b'{"model":"m","messages":[{"role":"tool","content":"a"}]}',
        b'{"model":"m","messages":[{"content":"a","role":"user"}]}',
        b'{"model":"m","messages":[{"role":"user","content":"a","name":"b"}]}',
        b'{"model":"m","messages":[{"role":"user","content":[{"type":"text","text":"a"}]}]}',
        b'{"model":"m","messages":[{"role":"user","content":null}]}',
        b'{"model":"m","messages":[{"role":"user","content":"a"}],"max_tokens":-1}',
        b'{"model":"m","messages":[{"role":"user","content":"a"}],"max_tokens":1.0}',
        b'{"model":"m","messages":[{"role":"user","content":"a"}],"max_tokens":01}',
        b'{"model":"m","messages":[{"role":"user","content":"a"}],"n":0}',
        b'{"model":"m","messages":[{"role":"user","content":"a"}],"stream":1}',
        b'{"model":"m","messages":[{"role":"user","content":"a"}],"stream":null}',
        b'{"model":"m","messages":[{"role":"user","content":"a"}],"tools":[]}',
        b'{"model":"m","messages":[{"role":"user","content":"a"}],"cache_salt":"s"}',
        b'{"model":"m","messages":[{"role":"user","content":"a"}],"chat_template_kwargs":{}}',
        b'{"model":"m","messages":[{"role":"user","content":"a"}],"seed":NaN}',
        b'{"model":"m","messages":[{"role":"user","content":"a"}],"stop":' + b"[" * 40 + b"]" * 40 + b"}",
        b'{"model":"unknown","messages":[{"role":"user","content":"a"}]}',
    ],
)  # fmt: skip
def test_what_is_not_plain_is_left_to_others(body: bytes) -> None:
    assert reader_of(tokenizer_of(as_llama_3, CHATML)).read(body) is None


def test_a_template_that_changes_contents_is_left_to_others() -> None:
    assert reader_of(tokenizer_of(as_llama_3, SHOUTED)).read(body_of(["a"])) is None


def test_contents_that_a_template_looks_into_are_left_to_others() -> None:
    tokenizer = tokenizer_of(as_gpt2, THINKING)
    reader = reader_of(tokenizer)
    assert check(reader, tokenizer, body_of(["a", "b", "c"])) is not None
    assert reader.read(body_of(["a", "x</think>b", "c"])) is None


@pytest.mark.parametrize("template", [ONLY_IF_SAID, WITH_A_BLANK_CHECK])
@pytest.mark.parametrize("blank", ["", " \n", "\u3000\u2003", "\x1c\x85\u00a0"])
def test_blank_contents_that_a_template_asks_for_are_left_to_others(template: str, blank: str) -> None:
    tokenizer = tokenizer_of(as_llama_3, template)
    reader = reader_of(tokenizer)
    assert check(reader, tokenizer, body_of([blank + "a", "b"])) is not None
    assert reader.read(body_of([blank, "b"])) is None


def body_of(texts: list[str], **further: Any) -> bytes:
    roles = ("user", "assistant")
    messages = [{"role": roles[place % 2], "content": text} for place, text in enumerate(texts)]
    return json.dumps({"model": "m", "messages": messages, **further}).encode()


@pytest.mark.parametrize(("maker", "template"), COMBINATIONS)
def test_turns_of_long_chats(maker: Callable[[], Tokenizer], template: str) -> None:
    """Grown, cut, changed in the middle, with other fields: whatever is known is used for what it is alone."""
    tokenizer = tokenizer_of(maker, template)
    read = 0

    @settings(max_examples=20, deadline=None)
    @given(st.integers(0, 10**9), contents(), contents())
    def run(seed: int, one: str, other: str) -> None:
        nonlocal read
        bits = ["fox ", "naïve café ", "12 ", "東京", "it's so", one, other]
        generator = random.Random(seed)
        reader = reader_of(tokenizer)
        texts = ["The quick brown fox. " * 20 + generator.choice(bits)]
        for turn in range(12):
            choice = generator.random()
            if choice < 0.15:
                texts[generator.randrange(len(texts))] = generator.choice(bits) + str(turn)
            elif choice < 0.3:
                del texts[generator.randrange(1, len(texts) + 1) :]
            else:
                texts += [generator.choice(bits) * generator.randrange(1, 90) + str(turn), f"then {turn}"]
            further = {"max_tokens": turn} if choice < 0.5 else {}
            chat = check(reader, tokenizer, body_of(texts, **further))
            if chat is not None and chat.tokens is not None:
                read += 1
                for size, known in chat.known_hashes.items():
                    hashes = sequence_hashes(chat.tokens, size)
                    assert known.tolist() == hashes[: len(known)].tolist()
                if choice > 0.2:  # as who places it does
                    size = generator.choice([4, 16])
                    chat.known_hashes[size] = sequence_hashes(chat.tokens, size)

    run()
    assert read > 20


def test_a_next_turn_costs_its_own_text() -> None:
    tokenizer = tokenizer_of(as_llama_3, CHATML)
    reader, plain = reader_of(tokenizer), tokenizer.plain
    assert plain is not None
    texts = [f"{place} the quick brown fox's " * 30 for place in range(20)]
    check(reader, tokenizer, body_of(texts))
    for turn in range(3):
        new, known = plain.new_characters, plain.known_characters
        texts += ["a question", "and its answer"]
        document = parse_inference(Endpoint.CHAT, body_of(texts))
        check(reader, tokenizer, body_of(texts, temperature=turn))
        characters = len(rendered(tokenizer, document))
        assert plain.new_characters - new + plain.known_characters - known == characters
        assert plain.new_characters - new < 200


def test_a_next_turn_begins_with_the_hashes_of_the_one_before() -> None:
    tokenizer = tokenizer_of(as_llama_3, CHATML)
    reader = reader_of(tokenizer)
    texts = [f"{place} the quick brown fox's " * 30 for place in range(20)]
    first = check(reader, tokenizer, body_of(texts))
    assert first is not None and first.tokens is not None and not first.known_hashes
    first.known_hashes[16] = sequence_hashes(first.tokens, 16)
    second = check(reader, tokenizer, body_of([*texts, "a question", "and its answer"]))
    assert second is not None and second.known_hashes.keys() == {16}
    known = second.known_hashes[16]
    assert len(first.known_hashes[16]) - 2 <= len(known) <= len(first.known_hashes[16])
    assert known.tolist() == first.known_hashes[16][: len(known)].tolist()


def rendered(tokenizer: PromptTokenizer, request: InferenceRequest) -> str:
    assert tokenizer._chat_template is not None
    return tokenizer._chat_template.render(request.document)


@pytest.mark.parametrize("template", [CHATML, ONLY_THE_LAST])
def test_what_is_known_is_used_though_the_last_turn_is_written_otherwise(template: str) -> None:
    tokenizer = tokenizer_of(as_llama_3, template)
    reader, plain = reader_of(tokenizer), tokenizer.plain
    assert plain is not None
    texts = [f"{place} the quick brown fox's " * 30 for place in range(20)]
    check(reader, tokenizer, body_of(texts))
    new, known = plain.new_characters, plain.known_characters
    assert check(reader, tokenizer, body_of([*texts, "a", "b"])) is not None
    assert plain.known_characters - known > 10 * (plain.new_characters - new)


def test_models_share_no_tokens() -> None:
    """Their names may stand behind the messages, so that the bodies begin alike."""
    one, other = tokenizer_of(as_llama_3, CHATML), tokenizer_of(as_qwen, TRIMMED)
    reader = PlainChats(lambda model: one.plain if model == "one" else other.plain)
    messages = [{"role": "user", "content": f" {place} naïve café" * 40} for place in range(9)]
    for model, tokenizer in (("one", one), ("other", other), ("one", one)):
        body = json.dumps({"messages": messages, "model": model}).encode()
        assert check(reader, tokenizer, body) is not None


def test_short_chats_of_several_models_one_after_the_other() -> None:
    """What is remembered of the last chat is used only where it is the same."""
    tokenizers = {"one": tokenizer_of(as_llama_3, CHATML), "two": tokenizer_of(as_qwen, TRIMMED)}
    tokenizers["on"] = tokenizer_of(as_gpt2, ONLY_THE_LAST)
    reader = PlainChats(lambda model: tokenizers[model].plain)

    @settings(max_examples=200, deadline=None)
    @given(st.lists(st.tuples(st.sampled_from(sorted(tokenizers)), MESSAGES), max_size=6))
    def run(chats: list[tuple[str, list[dict[str, str]]]]) -> None:
        for model, messages in chats:
            body = json.dumps({"model": model, "messages": messages}, ensure_ascii=False).encode()
            check(reader, tokenizers[model], body)

    run()
    assert check(reader, tokenizers["one"], body_of(["a", "b"]).replace(b'"m"', b'"one"')) is not None


def test_known_chats_keep_to_their_memory() -> None:
    tokenizer = tokenizer_of(as_llama_3, CHATML)
    plain = tokenizer.plain
    assert plain is not None
    before = plain.kept_bytes
    reader = reader_of(tokenizer, max_bytes=200_000)
    for chat in range(60):
        read = check(reader, tokenizer, body_of([f"{chat} {place} is it so?" * 30 for place in range(12)]))
        assert 0 <= plain.kept_bytes - before <= 200_000
        if read is not None and read.tokens is not None and chat >= 30:
            read.known_hashes[1] = sequence_hashes(read.tokens, 1)  # twice as large as the tokens
        if chat == 29:
            without_hashes = len(reader._known._kept)
    assert len(reader._known._kept) < 0.7 * without_hashes
    assert plain.kept_bytes - before > 100_000
    assert reader.read(body_of(["x" * 300_000, "y"])) is not None  # more than may be kept
    assert plain.kept_bytes - before <= 200_000


def test_layouts_keep_to_their_memory() -> None:
    tokenizer = tokenizer_of(as_llama_3, CHATML)
    assert tokenizer.plain is not None
    words, template = tokenizer.plain.words, ChatTemplate(CHATML, {})
    library = as_llama_3()
    segmentation = segmentation_of(library, lambda text: np.array(library.encode(text).ids))
    prompts = PlainPrompts(template, segmentation, words, max_layout_bytes=60_000)
    first = prompts.layout(b"\1")
    for length in range(1, 80):
        layout = prompts.layout(b"\1\2" * length)
        assert layout is not None
        assert prompts.layout(b"\1\2" * length) is layout
        assert 0 < prompts.layout_bytes <= 60_000
    again = prompts.layout(b"\1")
    assert again is not first
    assert again is not None
    assert first is not None
    assert again.shape == first.shape


def test_very_many_messages_are_left_to_others() -> None:
    tokenizer = tokenizer_of(as_llama_3, CHATML)
    reader = reader_of(tokenizer)
    assert check(reader, tokenizer, body_of(["a"] * 1_023)) is not None
    assert reader.read(body_of(["a"] * 1_025)) is None
    assert reader.read(body_of(["a"] * 5_000)) is None


def test_contents_that_are_written_again_and_again() -> None:
    source = (
        "{% for i in range(3) %}{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}{% endfor %}"
    )
    tokenizer = tokenizer_of(as_llama_3, source)
    reader = reader_of(tokenizer)
    for messages, size in ((1, 8), (300, 8), (20, 300), (1, 30_000), (20, 4_000)):
        assert check(reader, tokenizer, body_of(["fox's " * (size // 6)] * messages)) is not None
    assert reader.read(body_of(["a"] * 400)) is None  # more contents than there is room for


def test_a_content_that_is_written_more_often_than_others() -> None:
    source = (
        "{% for i in range(300) %}{{ messages[0].content }}{% endfor %}"
        "{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}"
    )
    tokenizer = tokenizer_of(as_llama_3, source)
    reader = reader_of(tokenizer)
    assert check(reader, tokenizer, body_of(["a ", "b", "c"])) is not None
    assert reader.read(body_of(["fox's " * 1_000] + ["b"] * 300)) is None
    assert check(reader, tokenizer, body_of(["a ", "b", "c"])) is not None


def test_much_new_text_is_left_for_a_thread() -> None:
    tokenizer = tokenizer_of(as_llama_3, CHATML)
    reader = reader_of(tokenizer)
    body = body_of(["fox " * (AT_ONCE_BYTES // 4), "b"])
    chat = reader.read(body)
    assert chat is not None
    assert chat.tokens is None
    assert check(reader, tokenizer, body) is not None
    again = reader.read(body)  # now it is known
    assert again is not None
    assert again.tokens is not None


async def test_the_service_tokenizes_long_chats_in_a_thread() -> None:
    tokenizer = PromptTokenizer.from_folder(TOKENIZER_FOLDER)
    service = TokenService({"m": tokenizer})
    body = body_of([f"{place} is new " * 5_000 for place in range(4)])
    chat = service.plain_chat(body)
    assert chat is not None
    assert chat.tokens is None
    prompt = await service.prompt(chat.request, plain=True)
    assert prompt.tokens.tolist() == tokenizer.tokens(parse_inference(Endpoint.CHAT, body)).tolist()
    known = service.plain_chat(body)
    assert known is not None
    assert np.array_equal(known.tokens, prompt.tokens)
    service.close()


def test_bodies_that_came_in_pieces() -> None:
    tokenizer = tokenizer_of(as_llama_3, CHATML)
    body = body_of(["piece " * 600, "by", "piece"])
    chat = reader_of(tokenizer).read(bytearray(body))
    assert chat is not None
    assert chat.tokens is not None
    assert chat.tokens.tolist() == tokenizer.tokens(parse_inference(Endpoint.CHAT, body)).tolist()


def test_what_the_libraries_refuse_is_refused_by_them() -> None:
    tokenizer = tokenizer_of(as_llama_3, CHATML)
    body = b'{"model":"m","messages":[{"role":"user"}],"max_tokens":-1}'
    assert check(reader_of(tokenizer), tokenizer, body) is None
    with pytest.raises(RequestError):
        parse_inference(Endpoint.CHAT, body)
