"""Every part of a request stands where the scheduler looks for it."""

from __future__ import annotations

import numpy as np
from msgspec.structs import asdict

from conductor.placement import PlacementRequest, TokenSource
from router.inference import Endpoint, InferenceRequest
from router.placement_question import placement_question
from router.terms import RequestTerms
from router.tokens import Prompt


def test_every_field_has_its_place() -> None:
    tokens = np.arange(3, dtype=np.uint32)
    request = InferenceRequest(Endpoint.COMPLETIONS, b"{}", {}, "model", True, 17, "salt")
    prompt = Prompt(tokens, 3, TokenSource.ENGINE, "no tokenizer")
    terms = RequestTerms("tenant", 4, 0.5, 0.25, None)
    asked = placement_question(
        request,
        prompt,
        terms,
        request_id="id",
        arrived_s=2.5,
        streamed=False,
    )
    expected = PlacementRequest(
        request_id="id",
        model="model",
        tokens=tokens,
        prompt_tokens=3,
        token_source=TokenSource.ENGINE,
        token_fallback="no tokenizer",
        streamed=False,
        max_output_tokens=17,
        cache_salt="salt",
        tenant="tenant",
        route="/v1/completions",
        priority=4,
        arrived_s=2.5,
        ttft_objective_s=0.5,
        tbt_objective_s=0.25,
    )
    assert asdict(asked) == asdict(expected)
