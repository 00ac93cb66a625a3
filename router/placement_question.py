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
    excluded: frozenset[str],
    retry_of: str | None = None,
    grant: int = 0,
) -> PlacementRequest:
    """``streamed`` where the end of the prefill will be seen; else it is taken to end as predicted."""
    return PlacementRequest(
        request_id=request_id,
        model=request.model,
        tokens=prompt.tokens,
        prompt_tokens=prompt.prompt_tokens,
        token_source=prompt.source,
        token_fallback=prompt.fallback,
        streamed=streamed,
        max_output_tokens=request.max_output_tokens,
        cache_salt=request.cache_salt,
        tenant=terms.tenant,
        route=request.endpoint.path if terms.route is None else terms.route,
        priority=terms.priority,
        arrived_s=arrived_s,
        ttft_objective_s=terms.ttft_objective_s,
        tbt_objective_s=terms.tbt_objective_s,
        excluded=excluded,
        retry_of=retry_of,
        grant=grant,
    )
