"""Ranges of blocks in a store that keeps larger chunks: only whole chunks can be acted on."""

from __future__ import annotations

from typing import NamedTuple

from cache_index.hashing import Tokens
from conductor.actions import ExecutionError, Prefix, TierAction


class ChunkRange(NamedTuple):
    """Chunks ``first`` to ``last`` (exclusive) of a prompt, as part of an action's blocks."""

    first: int
    last: int
    chunk_tokens: int

    def blocks(self, action: TierAction, chunks: int) -> int:
        """How many of the action's blocks the first ``chunks`` of these chunks hold whole."""
        assert action.prefix is not None
        size = action.prefix.namespace.block_size
        start = -(-max(self.first * self.chunk_tokens, action.start * size) // size)
        stop = min((self.first + chunks) * self.chunk_tokens, action.stop * size) // size
        return max(stop - start, 0)


def chunks_inside(action: TierAction, chunk_tokens: int) -> ChunkRange:
    """The chunks that lie wholly in an action's blocks. Raises ExecutionError when there are none."""
    prefix = known_prefix(action)
    size = prefix.namespace.block_size
    first, last = -(-action.start * size // chunk_tokens), action.stop * size // chunk_tokens
    if first >= last:
        raise ExecutionError(
            f"tokens {action.start * size} to {action.stop * size} have no whole chunk of {chunk_tokens} tokens"
        )
    return ChunkRange(first, last, chunk_tokens)


def chunks_up_to(action: TierAction, chunk_tokens: int) -> ChunkRange:
    """All whole chunks of the prompt up to the action's last block. Raises ExecutionError when there are none."""
    inside = chunks_inside(action, chunk_tokens)
    return inside._replace(first=0)


def known_prefix(action: TierAction) -> Prefix:
    """Raises ExecutionError for an action on a whole tier."""
    if action.prefix is None:
        raise ExecutionError(f"{action.kind} needs a prefix")
    return action.prefix


def known_tokens(action: TierAction) -> Tokens:
    """The tokens from the prompt's beginning to the action's last block. Raises ExecutionError without them."""
    prefix = known_prefix(action)
    wanted = action.stop * prefix.namespace.block_size
    if prefix.token_ids is None or len(prefix.token_ids) < wanted:
        known = 0 if prefix.token_ids is None else len(prefix.token_ids)
        raise ExecutionError(
            f"the store names its chunks by tokens, and of {wanted} tokens {known} are known here"
        )
    return prefix.token_ids[:wanted]
