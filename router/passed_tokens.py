"""Prompts as the token ids that were made for their placement, so that no engine tokenizes them a second time."""

from __future__ import annotations

from msgspec.structs import replace

from conductor.placement import TokenSource
from router.disaggregation.bodies import encoded
from router.inference import Endpoint, InferenceRequest
from router.tokens import Prompt

# The answer would show the prompt's text, or the ids would not be all of what is computed.
_NEED_THE_TEXT = ("echo", "suffix", "truncate_prompt_tokens", "prompt_embeds", "prompt_logprobs")
_TEXT_AND_IDS = {Endpoint.COMPLETIONS: ("prompt", "prompt"), Endpoint.GENERATE: ("text", "input_ids")}
_EXACT = frozenset((TokenSource.LOCAL, TokenSource.ENGINE))


def with_token_ids(request: InferenceRequest, prompt: Prompt) -> InferenceRequest:
    """The request with its prompt as ids; itself where that would change the answer, or the ids are not known.

    Texts with one prompt only: the body of a chat has no place for ids.
    """
    document = request.document
    fields = _TEXT_AND_IDS.get(request.endpoint)
    if (
        fields is None
        or prompt.source not in _EXACT
        or not len(prompt.tokens)
        or not isinstance(document.get(fields[0]), str)
        or any(document.get(name) for name in _NEED_THE_TEXT)
    ):
        return request
    text, ids = fields
    passed = {name: value for name, value in document.items() if name != text}
    passed[ids] = prompt.tokens.tolist()
    return replace(request, body=encoded(passed), parsed=passed)
