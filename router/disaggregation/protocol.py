"""What every hand-off protocol answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from router.inference import InferenceRequest


class HandoffError(Exception):
    """The prefill leg's answer cannot be used, or the protocol is unknown."""


@dataclass(frozen=True, slots=True)
class PrefillAnswer:
    """``transfer`` is what the decode leg needs, verbatim JSON; None when nothing can be transferred."""

    transfer: bytes | None
    cached_tokens: int | None = None


class HandoffProtocol(Protocol):
    """The bodies of both legs. Implementations are stateless."""

    @property
    def name(self) -> str: ...

    def hands_over(self, request: InferenceRequest) -> bool:
        """Whether these engines can split it; where not, the decode instance gets it whole."""

    def prefill_body(self, request: InferenceRequest, model: str) -> bytes: ...

    def prefill_answer(self, body: bytes) -> PrefillAnswer:
        """Read the prefill leg's response body. Raises HandoffError."""

    def decode_body(self, request: InferenceRequest, model: str, transfer: bytes) -> bytes: ...
