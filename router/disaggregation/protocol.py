"""What every hand-off protocol answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, Self

from conductor.placement import Target
from router.inference import InferenceRequest


class HandoffError(Exception):
    """The prefill instance's answer cannot be used, or the protocol is unknown."""


@dataclass(frozen=True, slots=True)
class PrefillAnswer:
    """``transfer`` is what the decode leg needs, as JSON; None when nothing can be transferred."""

    transfer: bytes | None
    cached_tokens: int | None = None


class Handoff(Protocol):
    """The bodies of one request's two legs, which follow each other.

    ``bootstrap_path`` is what to ask the server beside the prefill instance first, where there is one.
    """

    @property
    def bootstrap_path(self) -> str | None: ...

    def hands_over(self, request: InferenceRequest) -> bool:
        """Whether these engines can split it; where not, the decode instance gets it whole."""

    def bootstrap_answered(self, body: bytes) -> None:
        """Read what ``bootstrap_path`` answered. Raises HandoffError."""

    def prefill_body(self, request: InferenceRequest, model: str) -> bytes: ...

    def prefill_answer(self, body: bytes) -> PrefillAnswer:
        """Read the prefill leg's response body. Raises HandoffError."""

    def decode_body(self, request: InferenceRequest, model: str, transfer: bytes) -> bytes: ...


class JointHandoff:
    """Of one request that both instances get at once, with the same body; they find each other."""

    def body(self, request: InferenceRequest, model: str) -> bytes:
        raise NotImplementedError

    def prefill_answer(self, body: bytes) -> PrefillAnswer:
        """Read the prefill leg's response body; it transfers nothing. Raises HandoffError."""
        raise NotImplementedError


class HandoffProtocol(Protocol):
    """One of the ways in which engines hand over."""

    @property
    def name(self) -> str: ...

    def begin(self, prefill: Target) -> Handoff | JointHandoff:
        """For one request from that instance."""


class Stateless:
    """Of protocols whose decode leg needs only what the prefill leg answered: one hand-off serves for all."""

    bootstrap_path: str | None = None

    def begin(self, prefill: Target) -> Self:
        return self

    def bootstrap_answered(self, body: bytes) -> None:
        raise AssertionError("nothing was asked")
