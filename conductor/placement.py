"""What is asked of the scheduler and what it answers: one placement per request and attempt."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:  # router workers know placements, and must not load the index's compiled kernels
    from cache_index import Holder, Tier

Tokens = NDArray[np.uint32]
Hashes = NDArray[np.uint64]

BEGINNING_TOKENS = 1_024


class Role(StrEnum):
    """What an instance is used for. A mixed instance prefills and decodes the same request."""

    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"


class TokenSource(StrEnum):
    """Where a request's token ids came from, best first; placement without tokens is by load alone."""

    __hash__ = str.__hash__  # an enumeration's own is written in Python

    CLIENT = "client"  # the prompt was given as token ids
    LOCAL = "local"  # the router's own tokenizer
    ENGINE = "engine"  # an engine's /tokenize
    NONE = "none"  # unknown: no overlap can be computed


@dataclass(frozen=True, slots=True)
class Objectives:
    """What a request should meet: time to first token, and mean of the longest of its token gaps.

    ``tbt_share`` says which are the longest: a tenth (Mooncake, FAST'25, section 8.1); 1 for all of them.
    """

    ttft_s: float = 2.0
    tbt_s: float = 0.05
    tbt_share: float = 0.1


class PlacementRequest(msgspec.Struct, frozen=True, gc=False):
    """One request as the scheduler sees it.

    ``tokens`` are the prompt's token ids (uint32, empty when ``token_source`` is ``none``);
    ``prompt_tokens`` is their number, or an estimate when they are unknown.
    ``token_fallback`` says why they do not come from a better source.
    ``hashes`` stand for the tokens where only they are known: sequence hashes of ``hashes_block_size`` tokens.
    ``known_hashes`` are those of the tokens' leading full blocks, by block size, as far as they were worked out.
    ``prefill_on`` fixes the prefill rank, and leaves only the decode rank to choose.
    ``excluded`` names instances that already failed this request.
    ``hedge_of`` is the placement of this request that goes on, and beside which another one is asked for.
    ``ttft_objective_s`` and ``tbt_objective_s`` override the configured objectives.
    ``session`` names the conversation that the request continues, where the client says so.
    ``tenant`` is whose request it is, for shares and predictions; ``cache_tenant`` names the part of engines'
    caches that is its own, where engines keep tenants apart.
    ``arrived_s`` is when it came, where it was held before it is placed.
    ``grant`` names what the request was granted of its key's limits, for a router that does not keep them itself.
    A higher ``priority`` goes first. ``route`` tells kinds of work apart, whose answers have lengths of their own.
    """

    request_id: str
    model: str
    tokens: Tokens
    prompt_tokens: int
    token_source: TokenSource = TokenSource.LOCAL
    token_fallback: str | None = None
    streamed: bool = True
    max_output_tokens: int | None = None
    cache_salt: str | None = None
    tenant: str = "default"
    cache_tenant: str = "default"
    route: str = ""
    session: str | None = None
    priority: int = 0
    arrived_s: float | None = None
    ttft_objective_s: float | None = None
    tbt_objective_s: float | None = None
    known_hashes: dict[int, Hashes] = {}
    hashes: Hashes | None = None
    hashes_block_size: int | None = None
    prefill_on: Holder | None = None
    excluded: frozenset[str] = frozenset()
    retry_of: str | None = None
    hedge_of: str | None = None
    grant: int = 0

    def beginning(self) -> int | None:
        """Names the first `BEGINNING_TOKENS` of the prompt, by tokens or by hashes; None where neither is known.

        Prompts that begin alike share more, and get answers alike. Stable from one process to the next.
        """
        tokens = self.tokens
        if len(tokens):
            return zlib.crc32(tokens[:BEGINNING_TOKENS].tobytes())  # quicker than a view
        hashes, block_size = self.hashes, self.hashes_block_size
        if hashes is not None and block_size and (held := len(hashes)):
            blocks = BEGINNING_TOKENS // block_size or 1
            return hashes.item((blocks if blocks < held else held) - 1)
        return None


@dataclass(frozen=True, slots=True)
class Target:
    """An instance as the router needs it to send a request there."""

    instance_id: str
    url: str  # "http://host:port" or "https://host:port", no trailing slash
    host: str
    port: int
    rank: int = 0
    ranks: int = 1
    protocol: str = "vllm-nixl"  # prefill/decode hand-off protocol (router.disaggregation)
    bootstrap_port: int = 8998  # of a prefill instance, for protocols whose decode instances ask there
    tls: bool = False
    # Replaces the client's credentials on the way to this engine.
    api_key: str | None = field(default=None, repr=False)


class PlanSegment(msgspec.Struct, frozen=True, gc=False):
    """Prompt tokens ``start`` to ``stop`` come out of ``holder``'s ``tier``."""

    start: int
    stop: int
    holder: Holder
    tier: Tier


class PrefixPlan(msgspec.Struct, frozen=True, gc=False):
    """How the prefill rank comes by the prompt's KV: the segments in order, then compute from ``tokens`` on.

    ``fetch_s`` are its loads and fetches alone, ``prefill_s`` all of it, both predicted.
    """

    tokens: int
    segments: tuple[PlanSegment, ...]
    fetch_s: float
    prefill_s: float


class Placement(msgspec.Struct, frozen=True, gc=False):
    """The decision for one request: where it prefills, where it decodes, and what that should cost."""

    placement_id: str
    request_id: str
    model: str  # the name the engines know, aliases resolved
    prefill: Target
    decode: Target
    overlap_tokens: int  # on the prefill rank's device
    plan: PrefixPlan
    predicted_ttft_s: float
    predicted_tbt_s: float
    predicted_output_tokens: int = 0

    @property
    def disaggregated(self) -> bool:
        """Whether the KV cache is handed from one instance to another."""
        return self.prefill.instance_id != self.decode.instance_id


@dataclass(frozen=True, slots=True)
class Held:
    """A request that waits to be placed; the ticket names it when it is, and when its client leaves."""

    ticket: int


@dataclass(frozen=True, slots=True)
class Released:
    """What became of a request that waited."""

    ticket: int
    outcome: Placement | PlacementError


class Usage(msgspec.Struct, frozen=True, gc=False):
    """What an engine reported for a finished request; None where it reported nothing."""

    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None


class FailureKind(StrEnum):
    """How a leg of a placement failed."""

    UNREACHABLE = "unreachable"  # no connection, or it broke: the process is probably gone
    TIMEOUT = "timeout"  # nothing came back in time
    ERROR = "error"  # the engine answered 5xx


@dataclass(frozen=True, slots=True)
class InstanceFailure:
    instance_id: str
    kind: FailureKind
    detail: str


@dataclass(frozen=True, slots=True)
class ModelCard:
    """A model the cluster serves, merged over its instances."""

    model: str
    max_model_len: int | None
    instances: int
    parent: str | None = None  # base model of a LoRA adapter
    aliases: tuple[str, ...] = field(default=())


class PlacementError(Exception):
    """No placement could be made; the message says why and what to do."""


class UnknownModelError(PlacementError):
    """No instance of the cluster serves this model."""


class RejectedError(PlacementError):
    """Admission turned the request away: served now, it or others would miss their objectives."""

    def __init__(self, reason: str, stage: str, retry_after_s: float) -> None:
        super().__init__(reason)
        self.stage = stage  # that would have been overloaded: prefill, decode or queue
        self.retry_after_s = retry_after_s


class NoInstanceError(PlacementError):
    """Instances exist but none can take the request now."""


class TooLongError(PlacementError):
    """The prompt fits into no instance's KV memory: waiting will not help."""
