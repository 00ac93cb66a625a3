"""What the data path tells of a request while it is answered, for whoever traces it.

Nothing here depends on a tracing library: without one, a request has no trace and the client's own
``traceparent`` passes through to the engines.
"""

from __future__ import annotations

from typing import Protocol

from conductor.placement import Placement, Target, Usage
from router.heads import Headers
from router.inference import Endpoint, InferenceRequest
from router.tokens import Prompt


class RequestTrace(Protocol):
    """One request; its steps follow each other, and each ends where the next one begins."""

    @property
    def trace_id(self) -> str:
        """In hexadecimal, for logs."""

    def engine_headers(self, headers: Headers) -> Headers:
        """The client's header lines without those that `leg` puts its own for."""

    def tokenizing(self, request: InferenceRequest) -> None: ...

    def placing(self, prompt: Prompt) -> None: ...

    def placed(self, placement: Placement) -> None: ...

    def leg(self, target: Target, *, beside: bool = False) -> bytes:
        """A request to an engine begins; the header lines by which the engine's own spans join.

        ``beside``: the leg before it goes on, until `answered_beside`.
        """

    def answered(self, status: int) -> None:
        """By the engine of the current leg."""

    def answered_beside(self, status: int) -> None:
        """By the engine of the leg that another one was begun beside."""

    def settled(self, *, first: bool) -> None:
        """Of two legs beside each other only the first one, or the later, goes on."""

    def failed(self, kind: str, detail: str) -> None:
        """The current step, which ends with it; there may be another attempt."""

    def end(self, status: int, usage: Usage, *, attempts: int, first_byte_after_s: float | None) -> None:
        """Called once. The status is what the client got."""


class Tracing(Protocol):
    """Whoever traces requests; called from the event loop, so it must never wait."""

    def begin(self, endpoint: Endpoint, headers: Headers, request_id: str) -> RequestTrace: ...
