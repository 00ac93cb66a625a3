"""How a request is handed from a prefill instance to a decode instance, per engine protocol.

A protocol says what the two legs' bodies are; who runs them, in which order, and what happens when one
fails is the same for all and lives in :mod:`router.attempt`.
"""

from __future__ import annotations

from router.disaggregation.protocol import (
    Handoff,
    HandoffError,
    HandoffProtocol,
    JointHandoff,
    PrefillAnswer,
)
from router.disaggregation.sglang import Sglang
from router.disaggregation.trtllm import TensorRtLlm
from router.disaggregation.vllm_mooncake import VllmMooncake
from router.disaggregation.vllm_nixl import VllmNixl

__all__ = [
    "PROTOCOLS",
    "Handoff",
    "HandoffError",
    "HandoffProtocol",
    "JointHandoff",
    "PrefillAnswer",
    "handoff_protocol",
]

PROTOCOLS: dict[str, HandoffProtocol] = {
    protocol.name: protocol for protocol in (VllmNixl(), VllmMooncake(), TensorRtLlm(), Sglang())
}


def handoff_protocol(name: str) -> HandoffProtocol:
    """The protocol of that name. Raises HandoffError."""
    try:
        return PROTOCOLS[name]
    except KeyError:
        known = ", ".join(sorted(PROTOCOLS))
        raise HandoffError(f"unknown prefill/decode protocol {name!r}; known: {known}") from None
