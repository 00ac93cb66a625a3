"""What the sessions of each kind of workload contain.

Shapes and reuse rates are those of the survey of June 2026 where it has them: an API with shared system prompts
reuses 30 to 50 % of its input, a coding assistant 85 to 95 %, questions about documents 80 to 90 %, one-shot long
documents nothing. The other lengths are plausible, not measured.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

import numpy as np
from numpy.typing import NDArray

from simulator.workloads.prefix_names import Context, PrefixNames
from simulator.workloads.records import blocks_of

_ASKED_A_DOCUMENT = 25  # questions about a document, on average


@dataclass(frozen=True, slots=True)
class Turn:
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...]
    delay_s: float  # after the end of the answer before; nothing for a first turn


Session = list[Turn]


def chat_sessions(source: np.random.Generator, names: PrefixNames, requests: int) -> Iterator[Session]:
    """Five turns on average behind one system prompt of 600 tokens; twenty seconds to read and write."""
    for number in count():
        context = Context(names)
        context.append("chat system prompt", 600)
        yield _turns(
            *(source, context, number, min(20, int(source.geometric(1 / 5)))),
            added=(150, 0.9, 8_000),
            answered=(250, 0.7, 2_000),
            delay=(20.0, 0.8, 120.0),
        )


def coding_sessions(source: np.random.Generator, names: PrefixNames, requests: int) -> Iterator[Session]:
    """8,000 tokens of instructions and tools, about 40,000 of files, a question; then 3,500 a turn."""
    for number in count():
        context = Context(names)
        context.append("coding system prompt", 8_000)
        context.append(("files", number), _tokens(source, 40_000, 0.25, 90_000))
        yield _turns(
            *(source, context, number, 4 + min(20, int(source.geometric(1 / 9)))),
            added=(500, 0.5, 4_000),
            answered=(600, 0.6, 4_000),
            delay=(10.0, 0.8, 120.0),
            tool_results=(2_400, 0.6, 12_000),
        )


def agent_sessions(source: np.random.Generator, names: PrefixNames, requests: int) -> Iterator[Session]:
    """Twenty-five steps on average: 120 tokens of a tool call, its result, seconds apart."""
    for number in count():
        context = Context(names)
        context.append("agent system prompt and tools", 6_000)
        context.append(("task", number), _tokens(source, 800, 0.6, 8_000))
        yield _turns(
            *(source, context, number, 5 + min(55, int(source.geometric(1 / 20)))),
            added=(900, 1.0, 16_000),
            answered=(120, 0.6, 2_000),
            delay=(2.0, 1.0, 60.0),
        )


def rag_sessions(source: np.random.Generator, names: PrefixNames, requests: int) -> Iterator[Session]:
    """Single questions, each about one document; some documents are asked about much more than others.

    There is a document for every 25 requests, so that the share of first questions does not depend on how many
    requests there are.
    """
    documents = [
        _tokens(source, 8_000, 0.5, 32_000, 4_000) for _ in range(max(1, requests // _ASKED_A_DOCUMENT))
    ]
    popularity = _popularity(len(documents), 0.6)
    for number in count():
        context = Context(names)
        document = int(source.choice(len(documents), p=popularity))
        context.append("retrieval system prompt", 500)
        context.append(("document", document), documents[document])
        context.append(("question", number), _tokens(source, 500, 0.7, 4_000))
        yield [_turn(context, _tokens(source, 300, 0.6, 2_000), 0.0)]


def api_sessions(source: np.random.Generator, names: PrefixNames, requests: int) -> Iterator[Session]:
    """Single requests of twenty applications, each with a system prompt of its own of 1,000 to 3,000 tokens."""
    prompts = [int(source.integers(1_000, 3_001)) for _ in range(20)]
    popularity = _popularity(len(prompts), 0.8)
    for number in count():
        context = Context(names)
        application = int(source.choice(len(prompts), p=popularity))
        context.append(("application", application), prompts[application])
        context.append(("request", number), _tokens(source, 1_800, 0.7, 16_000))
        yield [_turn(context, _tokens(source, 250, 0.7, 4_000), 0.0)]


def long_sessions(source: np.random.Generator, names: PrefixNames, requests: int) -> Iterator[Session]:
    """Single requests of 131,072 to 1,048,576 tokens, every length's logarithm as likely as any other's."""
    while True:
        input_tokens = int(2.0 ** source.uniform(17, 20))
        hash_ids = names.unshared(blocks_of(input_tokens, names.block_tokens))
        yield [Turn(input_tokens, _tokens(source, 800, 0.6, 8_000), hash_ids, 0.0)]


_Spread = tuple[float, float, float]  # median, standard deviation of the logarithm, largest


def _turns(
    source: np.random.Generator,
    context: Context,
    session: int,
    turns: int,
    *,
    added: _Spread,
    answered: _Spread,
    delay: _Spread,
    tool_results: _Spread | None = None,
) -> Session:
    """A context that grows by each answer and what follows it."""
    made = []
    for number in range(turns):
        if number and tool_results is not None:
            context.append(("tool result", session, number), _tokens(source, *tool_results))
        context.append(("input", session, number), _tokens(source, *added))
        output_tokens = _tokens(source, *answered)
        made.append(_turn(context, output_tokens, float(_drawn(source, *delay))))
        context.append(("answer", session, number), output_tokens)
    return made


def _turn(context: Context, output_tokens: int, delay_s: float) -> Turn:
    return Turn(context.tokens, output_tokens, context.hash_ids(), delay_s)


def _tokens(
    source: np.random.Generator, median: float, spread: float, largest: float, least: float = 1.0
) -> int:
    return int(max(least, _drawn(source, median, spread, largest)))


def _drawn(source: np.random.Generator, median: float, spread: float, largest: float) -> float:
    return min(largest, float(median * np.exp(spread * source.standard_normal())))


def _popularity(things: int, exponent: float) -> NDArray[np.float64]:
    weights = 1.0 / np.arange(1, things + 1) ** exponent
    shares: NDArray[np.float64] = weights / weights.sum()
    return shares
