"""One sequence on its way through the engine: what was asked for, and how far it is."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from enum import Enum, auto

from simulator.block_hash import HashChain


@dataclass(frozen=True, slots=True)
class RemoteKv:
    """KV cache that a prefill instance holds: tokens it covers, and how many were a cache hit there."""

    tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Submission:
    """One sequence to run. ``output`` is never empty; its last token ends the sequence."""

    request_id: str
    prompt: SequenceOf[int]
    output: SequenceOf[int]
    salt: str | None = None
    session_id: str | None = None
    report_hits: bool = False  # announce cache hits again as stores
    lease_kv: bool = False  # keep the blocks for a decode instance after the end
    remote: RemoteKv | None = None  # pull the KV cache from a prefill instance first


class State(Enum):
    WAITING = auto()
    PULLING = auto()  # blocks are allocated, the KV cache is on its way
    RUNNING = auto()
    FINISHED = auto()
    ABORTED = auto()


class Sequence:
    """A submission's progress. ``tokens`` is the prompt and what was produced so far."""

    __slots__ = (
        "blocks",
        "cached_tokens",
        "chain",
        "committed",
        "computed",
        "produced",
        "pulled",
        "state",
        "submission",
        "tokens",
    )

    def __init__(self, submission: Submission, block_size: int) -> None:
        self.submission = submission
        self.tokens = list(submission.prompt)
        self.chain = HashChain(self.tokens, block_size, submission.salt)
        self.blocks: list[int] = []
        self.computed = 0  # tokens whose KV is in ``blocks``
        self.committed = 0  # leading blocks that others can find
        self.produced = 0
        self.cached_tokens: int | None = None  # hit at first admission
        self.pulled = False
        self.state = State.WAITING

    @property
    def request_id(self) -> str:
        return self.submission.request_id

    @property
    def finished(self) -> bool:
        return self.state is State.FINISHED

    @property
    def pull_tokens(self) -> int:
        """Tokens whose KV has to be fetched from the prefill instance; the rest was found here."""
        assert self.submission.remote is not None
        return max(min(self.submission.remote.tokens, len(self.submission.prompt)) - self.computed, 0)
