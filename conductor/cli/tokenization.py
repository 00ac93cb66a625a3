"""The router's tokenizers for prompts that come to `POST /v1/placements` as text or messages."""

from __future__ import annotations

from typing import Any

import orjson

from conductor.placement import TokenSource
from conductor.rest import TokenizedPrompt
from router import TokenService
from router.inference import Endpoint, InferenceRequest


class PlacementTokens:
    """Tokenizes as the front door would the same request."""

    def __init__(self, tokens: TokenService) -> None:
        self._tokens = tokens

    async def __call__(self, document: dict[str, Any]) -> TokenizedPrompt | None:
        request = InferenceRequest(
            endpoint=Endpoint.CHAT if "messages" in document else Endpoint.COMPLETIONS,
            body=orjson.dumps(document),
            parsed=document,
            model=document["model"],
            stream=False,
            max_output_tokens=None,
            cache_salt=None,
        )
        prompt = self._tokens.prompt_at_once(request) or await self._tokens.prompt(request)
        if prompt.source is TokenSource.NONE:
            return None
        return TokenizedPrompt(prompt.tokens, prompt.source, prompt.fallback)
