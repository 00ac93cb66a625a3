"""How far an instance class, quadratic in prefill and affine in decode, is from the roofline it came from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from conductor.catalogue import Deployment, chunked_prefill_s, decode_step_s
from conductor.costs import Floats, InstanceClass

PROMPTS: Final = (1024, 4096, 16_384, 32_768)
CACHED_SHARES: Final = (0.0, 0.5, 0.75)
BATCHES: Final = (1, 8, 32, 128)
CONTEXTS: Final = (1024, 4096, 16_384)


@dataclass(frozen=True, slots=True)
class AffineErrors:
    """Relative errors at `PROMPTS` x `CACHED_SHARES` and at `BATCHES` x `CONTEXTS` that fit the KV cache."""

    prefill: Floats
    decode: Floats


def affine_errors(instance_class: InstanceClass, deployment: Deployment) -> AffineErrors:
    """Between the points it was fitted at, within the range in which it is used."""
    prefill = [
        float(instance_class.prefill_s(tokens, np.array([cached]))[0])
        / chunked_prefill_s(deployment, tokens, cached, instance_class.chunk_tokens)
        - 1
        for tokens in PROMPTS
        for cached in (int(tokens * share) for share in CACHED_SHARES)
    ]
    decode = [
        float(instance_class.decode_step_s(np.array([batch]), np.array([batch * context]))[0])
        / decode_step_s(deployment, batch, batch * context)
        - 1
        for batch in BATCHES
        for context in CONTEXTS
        if batch * context <= instance_class.kv_capacity_tokens
    ]
    return AffineErrors(np.array(prefill), np.array(decode))
