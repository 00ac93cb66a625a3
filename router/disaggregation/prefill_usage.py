"""How much of the prompt the prefill instance had cached, as its answer's ``usage`` tells it."""

from __future__ import annotations

import msgspec


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class PrefillUsage(msgspec.Struct):
    """In the words of any of the APIs."""

    prompt_tokens_details: _PromptDetails | None = None
    input_tokens_details: _PromptDetails | None = None
    cache_read_input_tokens: int | None = None

    @property
    def cached_tokens(self) -> int | None:
        details = self.prompt_tokens_details or self.input_tokens_details
        return details.cached_tokens if details is not None else self.cache_read_input_tokens
