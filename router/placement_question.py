"""What the scheduler is asked for an inference request, whoever sends it on."""

from __future__ import annotations

from conductor.placement import PlacementRequest
from router.inference import InferenceRequest
from router.terms import RequestTerms
from router.tokens import Prompt


def placement_question(
    request: InferenceRequest,
    prompt: Prompt,
    terms: RequestTerms,
    *,
    request_id: str,
    arrived_s: float,
    streamed: bool,
) -> PlacementRequest:
    """``streamed`` where the end of the prefill will be seen; else it is taken to end as predicted."""
    route = terms.route
    return PlacementRequest(  # by position: names would take it six times as long
        request_id,
        request.model,
        prompt.tokens,
        prompt.prompt_tokens,
        prompt.source,
        prompt.fallback,
        streamed,
        request.max_output_tokens,
        request.cache_salt,
        terms.tenant,
        "default",  # cache_tenant
        request.endpoint.path if route is None else route,
        None,  # session
        terms.priority,
        arrived_s,
        terms.ttft_objective_s,
        terms.tbt_objective_s,
        prompt.known_hashes,
    )
