"""Tier actions: the orders that move, keep and drop cache, what they promise, and who can carry them out."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from cache_index import Holder, Namespace, Tier


class ActionKind(StrEnum):
    REPLICATE = "replicate"  # a copy for another holder, where load is going
    MOVE = "move"  # the same, and the source drops its own
    PROMOTE = "promote"  # to a faster tier of the same holder, for a request that waits
    PREFETCH = "prefetch"  # the same, for one that is expected
    DEMOTE = "demote"  # to a slower tier
    EVICT = "evict"  # drop from a tier; without a prefix, everything there
    PIN = "pin"
    UNPIN = "unpin"
    COMPRESS = "compress"
    DECOMPRESS = "decompress"


class Place(NamedTuple):
    """One tier of one holder (an instance, or a shared pool)."""

    holder: Holder
    tier: Tier

    def __str__(self) -> str:
        return f"{self.holder.instance_id}/{self.tier.name.lower()}"


class Prefix(msgspec.Struct, frozen=True, eq=False, gc=False):
    """A prompt's beginning as the index names it: sequence hashes, and the tokens where they are known.

    Executors that key their chunks by tokens (LMCache) can do nothing without them, and need the salt beside
    them, which in ``hashes`` is included.
    """

    namespace: Namespace
    hashes: NDArray[np.uint64]
    token_ids: NDArray[np.uint32] | None = None
    cache_salt: str | None = None


class TierAction(msgspec.Struct, frozen=True, eq=False, gc=False):
    """One order for blocks ``start`` to ``stop`` of a prefix, with what it should bring and cost, and why.

    ``source`` is None where nothing is read (evict, pin, unpin); ``prefix`` only to evict a whole tier.
    ``benefit_s`` are the seconds of time to first token that it should save, probability included; ``cost_s``
    what it costs others on the links that it uses. Done after ``deadline_s`` it is of no use.
    """

    action_id: str
    kind: ActionKind
    prefix: Prefix | None
    start: int
    stop: int
    source: Place | None
    target: Place
    kv_bytes: int  # of raw KV, also where a tier encodes
    benefit_s: float
    cost_s: float
    deadline_s: float
    reason: str

    @property
    def blocks(self) -> int:
        return self.stop - self.start


class ExecutionError(Exception):
    """An action could not be carried out. ``retryable``: the same order may succeed later."""

    def __init__(self, detail: str, *, retryable: bool = False) -> None:
        super().__init__(detail)
        self.retryable = retryable


class Executor(Protocol):
    """Carries out the actions that it can; never on a request's critical path."""

    @property
    def name(self) -> str: ...

    def can(self, kind: ActionKind, source: Place | None, target: Place) -> bool:
        """Whether this executor carries out such an action between such places; the planner asks for no other."""
        ...

    async def execute(self, action: TierAction) -> int:
        """Returns, when the action has completed, for how many blocks of its range it holds now.

        Fewer than `TierAction.blocks` when the source had lost some. Raises ExecutionError saying why nothing
        was done. Cancelled, it stops waiting; what the store has begun it may finish.
        """
        ...
