"""What the tokens of a growing chat cost: thread CPU a request, with and without the tokens that are kept.

A chat grows turn by turn to 8, 32 and 128 KB of rendered text. Ways to its tokens, for each size:

- direct: `encode_batch_fast` of the tokenizers library over the rendered text, and nothing else;
- cold: the front door's tokenizer, cache on and empty: rendering, splitting, tokenizing, keeping;
- new turn: the same when all but the last exchange was tokenized before, as in each of the last four turns;
- plain, plain turn: from the body's bytes, which compiled code reads, renders and tokenizes: all new, and the last
  four turns. What the template writes of so many messages is known from another chat; the first of each length
  takes some us a message more.

Words are drawn as often as Zipf's law has it from 20,000, and one in twenty is a number that no other text has.
Cold and the new turn include rendering the chat template but not parsing; plain is all of it. Beside them is how
long the template takes over messages that it has rendered before. Medians over chats of different text. Before
anything is timed, the tokens of all are compared.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the work is done on the thread that is timed

import numpy as np
import orjson
from tokenizers import Tokenizer

sys.path[0] = str(Path(__file__).resolve().parents[1])  # `simulator` is the package, not the script here

from conductor.placement import Tokens
from router import PromptTokenizer
from router.chat_template import ChatTemplate
from router.inference import Endpoint, InferenceRequest, parse_inference
from router.known_bodies import KnownBodies
from router.plain_chats import PlainChats
from simulator.emulator.tokens import TOKENIZER_FOLDER

SIZES_KB = (8, 32, 128)
QUESTION_WORDS, ANSWER_WORDS = 40, 160
SYLLABLES = [a + b + c for a in "bcdfghklmnprstvw" for b in "aeiou" for c in ("", "n", "r", "s", "l")]
VOCABULARY = 20_000  # words, used as often as Zipf's law has it
DIFFERENT = "the tokens differ from those of direct encoding"
NUMBERS = 0.05  # of the words, drawn from so many that each is new


def _vocabulary() -> tuple[list[str], np.ndarray[Any, np.dtype[np.float64]]]:
    generator = np.random.default_rng(0)
    lengths = generator.integers(1, 5, VOCABULARY)
    made = ("".join(SYLLABLES[at] for at in generator.integers(0, len(SYLLABLES), each)) for each in lengths)
    often = 1 / np.arange(1, VOCABULARY + 1)
    return list(made), np.cumsum(often / often.sum())


WORDS, OFTEN = _vocabulary()


def made_text(generator: np.random.Generator, words: int) -> str:
    drawn = np.searchsorted(OFTEN, generator.random(words)).clip(max=VOCABULARY - 1)
    numbers = generator.integers(0, 1 << 30, words)
    is_number = generator.random(words) < NUMBERS
    return (
        " ".join(
            str(number) if instead else WORDS[at]
            for at, number, instead in zip(drawn.tolist(), numbers.tolist(), is_number.tolist(), strict=True)
        )
        + "."
    )


def grown_chat(seed: int, size_bytes: int) -> list[dict[str, str]]:
    """Question and answer in turns, ended by a question, of about so much text."""
    generator = np.random.default_rng(seed)
    messages = [{"role": "system", "content": made_text(generator, ANSWER_WORDS)}]
    length = len(messages[0]["content"])
    while True:
        messages.append({"role": "user", "content": made_text(generator, QUESTION_WORDS)})
        length += len(messages[-1]["content"])
        if length >= size_bytes:
            return messages
        messages.append({"role": "assistant", "content": made_text(generator, ANSWER_WORDS)})
        length += len(messages[-1]["content"])


def chat_request(messages: list[dict[str, str]], bodies: KnownBodies) -> InferenceRequest:
    body = orjson.dumps({"model": "m", "messages": messages})
    return parse_inference(Endpoint.CHAT, body, read=bodies.read)


def cpu_us(work: Callable[[], object]) -> float:
    started_ns = time.thread_time_ns()
    work()
    return (time.thread_time_ns() - started_ns) / 1e3


def reader_of(folder: Path, turns: list[list[dict[str, str]]]) -> PlainChats:
    """Which knows what the template writes of so many messages."""
    tokenizer = PromptTokenizer.from_folder(folder)
    reader = PlainChats(lambda _: tokenizer.plain)
    for messages in turns:
        read(
            reader, orjson.dumps({"model": "m", "messages": [{**each, "content": "x"} for each in messages]})
        )
    return reader


def read(reader: PlainChats, body: bytes | bytearray) -> Tokens:
    chat = reader.read(body)
    if chat is None:
        raise SystemExit(
            "the tokenizer's chats are not read by compiled code: its words or its template do not allow it"
        )
    tokens = chat.tokens if chat.tokens is not None else reader.tokenize(body)
    assert tokens is not None
    return tokens


def evaluate(folder: Path, size_bytes: int, chats: int) -> dict[str, Any]:
    plain = Tokenizer.from_file(str(folder / "tokenizer.json"))
    config = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
    jinja = folder / "chat_template.jinja"
    source = jinja.read_text("utf-8") if jinja.is_file() else config["chat_template"]
    specials = {
        name: config[name] for name in ("bos_token", "eos_token") if isinstance(config.get(name), str)
    }
    template = ChatTemplate(source, specials)
    names = ("render", "direct", "cold", "new_turn", "plain", "plain_turn")
    measured: dict[str, list[float]] = {name: [] for name in names}
    sizes, tokens = [], []
    for seed in range(chats):
        messages = grown_chat(seed, size_bytes)
        bodies = KnownBodies()
        turns = [chat_request(messages[: len(messages) - back], bodies) for back in (8, 6, 4, 2, 0)]
        request = turns[-1]
        text = template.render(request.document)
        expected = plain.encode_batch_fast([text], add_special_tokens=False)[0].ids
        cold, warm = PromptTokenizer.from_folder(folder), PromptTokenizer.from_folder(folder)
        if cold.cache_state().off is not None:
            raise SystemExit(f"{folder}: nothing is kept, as {cold.cache_state().off}")
        measured["render"].append(cpu_us(partial(template.render, request.document)))
        measured["direct"].append(cpu_us(partial(plain.encode_batch_fast, [text], add_special_tokens=False)))
        measured["cold"].append(cpu_us(partial(cold.tokens, request)))
        times_us = [cpu_us(partial(warm.tokens, turn)) for turn in turns]
        measured["new_turn"].append(statistics.median(times_us[1:]))
        for ours in (cold, warm):
            assert ours.tokens(request).tolist() == expected, DIFFERENT
        reader = reader_of(folder, [turn.document["messages"] for turn in turns])
        measured["plain"].append(cpu_us(partial(read, reader, request.body)))
        assert read(reader, request.body).tolist() == expected, DIFFERENT
        reader = reader_of(folder, [turn.document["messages"] for turn in turns])
        times_us = [cpu_us(partial(read, reader, turn.body)) for turn in turns]
        measured["plain_turn"].append(statistics.median(times_us[1:]))
        assert read(reader, request.body).tolist() == expected, DIFFERENT
        sizes.append(len(text))
        tokens.append(len(expected))
    return {
        "kb": size_bytes // 1024,
        "characters": round(statistics.mean(sizes)),
        "tokens": round(statistics.mean(tokens)),
        **{f"{name}_us": round(statistics.median(times_us), 1) for name, times_us in measured.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--quick", action="store_true", help="7 chats of each size instead of 40")
    parser.add_argument(
        "--tokenizer", type=Path, default=TOKENIZER_FOLDER, help="folder of a model's tokenizer files"
    )
    options = parser.parse_args()
    chats = 7 if options.quick else 40
    evaluate(options.tokenizer, 8 * 1024, 2)  # warm up
    results = [evaluate(options.tokenizer, kb * 1024, chats) for kb in SIZES_KB]
    if options.json:
        print(json.dumps({"benchmark": "tokens", "tokenizer": str(options.tokenizer), "results": results}))
        return
    print(f"us of thread CPU a request, medians of {chats} chats")
    print(
        f"{'KB':>5}{'tokens':>9}{'render':>10}{'direct':>10}{'cold':>10}{'new turn':>10}{'plain':>10}"
        f"{'plain turn':>12}{'direct/plain turn':>19}"
    )
    for r in results:
        print(
            f"{r['kb']:>5}{r['tokens']:>9}{r['render_us']:>10.0f}{r['direct_us']:>10.0f}{r['cold_us']:>10.0f}"
            f"{r['new_turn_us']:>10.0f}{r['plain_us']:>10.0f}{r['plain_turn_us']:>12.0f}"
            f"{r['direct_us'] / r['plain_turn_us']:>19.1f}"
        )


if __name__ == "__main__":
    main()
