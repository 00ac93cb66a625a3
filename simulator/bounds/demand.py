"""What requests ask of a cluster at the very least, in tokens: whichever order and place they are served in.

**Blocks are counted once, with the request that brings them first.** A full block is named by all that is before
it, so its KV cache is the same wherever it is computed. A request has its first token only when every block of
its prompt was computed by somebody. A block that nobody who arrived earlier refers to is therefore computed at
least once between this request's arrival and its first token, by whomever. Counted with the first that arrives,
no block counts twice, and the order in which requests are really served does not matter: a later request that
overtakes may well do the computing. As each block needs those before it, a prompt's blocks are computed one after
the other, not side by side.

**What nobody can share counts with each request**: the tokens behind the last full block, and the last full block
where the prompt ends with it, for the last token is always computed, with its block. Where that recomputation of
one request may be what others reuse, the block is counted with it alone.

**What may be computed beside the instances meant for it** is known too: an instance that decodes may prefill the
last tokens of a prompt when all else is cached, up to a limit. A block that is not among the last tokens of any
prompt is computed elsewhere; ``elsewhere_tokens`` are those.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from conductor.costs import Floats, Ints
from simulator.cluster.workload import Request


@dataclass(frozen=True, slots=True)
class PromptBlocks:
    """All references to blocks, in order of arrival; arrays of [reference] unless said otherwise."""

    request: Ints  # position in the order of arrival
    position: Ints  # in its prompt
    block: Ints  # consecutive numbers for the hashes
    usable: Floats  # 1 where a cached block would be reused, 0 for the block of a prompt's last token
    due: Floats  # 1 where the block is counted with this request
    users: Ints  # [block] references to it


@dataclass(frozen=True, slots=True)
class Demand:
    """Arrays of [request], in order of arrival. ``tokens`` and ``squares`` are of the prompt's part that is due,
    ``elsewhere_tokens`` and ``elsewhere_squares`` of that part of it which decode instances never compute.

    Computing tokens ``p`` to ``n`` costs ``a (n - p) + b (n^2 - p^2)``: ``squares`` sums the latter differences.
    Gaps are those between tokens: decode steps after the first token. ``contexts`` sums the context over them,
    ``room_steps`` the room held over them; ``room`` is what the prompt holds. Of a block that several requests
    refer to each one holds an equal part, so that those of any set on one instance never hold more than they do.
    """

    arrival_s: Floats
    prompt_tokens: Floats
    output_tokens: Floats
    tokens: Floats
    squares: Floats
    elsewhere_tokens: Floats
    elsewhere_squares: Floats
    gaps: Floats
    contexts: Floats
    room: Floats
    room_steps: Floats
    decode_prefill_tokens: int

    def __len__(self) -> int:
        return len(self.arrival_s)


def prompt_blocks(requests: Sequence[Request], block_tokens: int) -> PromptBlocks:
    """Raises ValueError for requests out of order, without tokens, or with more blocks than their tokens fill."""
    _check(requests, block_tokens)
    counts = np.array([len(request.hashes) for request in requests], np.int64)
    usable = np.array([(request.prompt_tokens - 1) // block_tokens for request in requests], np.int64)
    hashes = np.concatenate([request.hashes for request in requests]) if requests else np.empty(0, np.uint64)
    number = np.repeat(np.arange(len(requests)), counts)
    position = np.arange(len(hashes)) - np.repeat(np.cumsum(counts) - counts, counts)
    _, first, block, users = np.unique(hashes, return_index=True, return_inverse=True, return_counts=True)
    reusable = position < usable[number]
    recomputed = np.zeros(len(users), bool)  # by someone who could not use it
    recomputed[block[~reusable]] = True
    due = ~reusable
    due[first] |= ~recomputed
    return PromptBlocks(number, position, block, reusable.astype(float), due.astype(float), users)


def demand(
    requests: Sequence[Request], blocks: PromptBlocks, block_tokens: int, decode_prefill_tokens: int = 0
) -> Demand:
    """``blocks`` are `prompt_blocks` of the same requests.

    ``decode_prefill_tokens`` are the most that a decode instance computes of a prompt.
    """
    size = len(requests)
    prompt = np.array([request.prompt_tokens for request in requests], float)
    output = np.array([request.output_tokens for request in requests], float)
    hashed = np.array([len(request.hashes) for request in requests], float) * block_tokens
    block_squares = (2.0 * blocks.position + 1.0) * block_tokens**2
    rest, rest_squares = prompt - hashed, prompt**2 - hashed**2
    elsewhere = hashed < prompt - decode_prefill_tokens
    last = blocks.position * block_tokens >= (prompt - decode_prefill_tokens)[blocks.request]
    among_last = np.zeros(len(blocks.users), bool)
    among_last[blocks.block[last]] = True
    due_elsewhere = blocks.due * ~among_last[blocks.block]
    gaps = output - 1.0
    room = rest + _sums(blocks, block_tokens / blocks.users[blocks.block], size)
    return Demand(
        arrival_s=np.array([request.arrival_s for request in requests], float),
        prompt_tokens=prompt,
        output_tokens=output,
        tokens=rest + block_tokens * _sums(blocks, blocks.due, size),
        squares=rest_squares + _sums(blocks, blocks.due * block_squares, size),
        elsewhere_tokens=rest * elsewhere + block_tokens * _sums(blocks, due_elsewhere, size),
        elsewhere_squares=rest_squares * elsewhere + _sums(blocks, due_elsewhere * block_squares, size),
        gaps=gaps,
        contexts=gaps * prompt + gaps * (gaps + 1.0) / 2.0,
        room=room,
        room_steps=gaps * room + gaps * (gaps + 1.0) / 2.0,
        decode_prefill_tokens=decode_prefill_tokens,
    )


def _sums(blocks: PromptBlocks, weights: Floats, requests: int) -> Floats:
    return np.bincount(blocks.request, weights, requests).astype(np.float64)


def _check(requests: Sequence[Request], block_tokens: int) -> None:
    if block_tokens < 1:
        raise ValueError(f"block_tokens must be at least 1, not {block_tokens}")
    before_s = 0.0
    for request in requests:
        if request.arrival_s < before_s:
            raise ValueError(
                f"request {request.number} arrives at {request.arrival_s} s, before the one before it or before "
                "time 0; sort the requests by arrival"
            )
        before_s = request.arrival_s
        if request.prompt_tokens < 1 or request.output_tokens < 1:
            raise ValueError(f"request {request.number}: prompt_tokens and output_tokens must be positive")
        if len(request.hashes) * block_tokens > request.prompt_tokens:
            raise ValueError(
                f"request {request.number}: {len(request.hashes)} blocks of {block_tokens} tokens are more than "
                f"its {request.prompt_tokens} prompt tokens; is block_tokens that of the trace?"
            )
