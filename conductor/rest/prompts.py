"""A request for a placement as clients write it: its prompt in one of four forms, and what else counts."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any, Protocol

import numpy as np
from pydantic import AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from conductor.placement import Hashes, PlacementRequest, Tokens, TokenSource

MOST_TOKENS = 1 << 32  # more than any request or cache has: what is beyond it is a mistake
_WORD = (1 << 64) - 1
_HEX = re.compile(r"(0[xX])?[0-9a-fA-F]{1,16}")
_EXAMPLE: dict[str, Any] = {
    "model": "llama-3.1-8b",
    "messages": [{"role": "user", "content": "Summarise the report."}],
    "max_output_tokens": 256,
    "tenant": "research",
    "objectives": {"ttft_s": 1.0},
}


def _unsigned(value: Any) -> list[int] | None:
    """Sequence hashes as 64-bit words: unsigned, signed (two's complement) or hexadecimal."""
    if value is None:
        return None
    if not isinstance(value, list) or not value:
        raise ValueError("must be a list of at least one sequence hash")
    words = []
    for i, each in enumerate(value):
        if isinstance(each, str) and _HEX.fullmatch(each):
            words.append(int(each, 16))
        elif isinstance(each, int) and not isinstance(each, bool) and -(1 << 63) <= each <= _WORD:
            words.append(each & _WORD)
        else:
            raise ValueError(
                f"entry {i} must be an integer of 64 bits, signed or unsigned, or up to 16 hexadecimal "
                f"digits in a string, not {each!r}"
            )
    return words


class ObjectivesQuery(BaseModel):
    """What this request should meet, instead of the configured objectives."""

    model_config = ConfigDict(extra="forbid")

    ttft_s: Annotated[
        float | None, Field(gt=0, allow_inf_nan=False, description="Time to first token, seconds.")
    ] = None
    tbt_s: Annotated[
        float | None, Field(gt=0, allow_inf_nan=False, description="Time between tokens, seconds.")
    ] = None


class PlacementQuery(BaseModel):
    """A request to be placed. The prompt comes in exactly one form: `text`, `messages`, `token_ids` or `hashes`."""

    model_config = ConfigDict(
        extra="forbid", populate_by_name=True, json_schema_extra={"examples": [_EXAMPLE]}
    )

    model: Annotated[str, Field(min_length=1, description="A model, LoRA adapter or alias of /v1/models.")]
    text: Annotated[str | None, Field(min_length=1, description="The prompt, tokenized here.")] = None
    messages: Annotated[
        list[dict[str, Any]] | None,
        Field(min_length=1, description="A chat, as for /v1/chat/completions; templated, tokenized here."),
    ] = None
    tools: Annotated[list[dict[str, Any]] | None, Field(description="Of the chat template.")] = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, Field(description="Of the chat template.")] = None
    token_ids: Annotated[
        list[Annotated[int, Field(ge=0, lt=2**32)]] | None,
        Field(min_length=1, description="The prompt as the engine's tokenizer would make it."),
    ] = None
    hashes: Annotated[
        list[int] | None,
        BeforeValidator(_unsigned),
        Field(
            validation_alias=AliasChoices("hashes", "seq_hashes"),
            description="Sequence hashes of the prompt's whole blocks (RFC #1527, seed 1337): unsigned or signed "
            "64-bit integers, or hexadecimal strings, which JavaScript does not round. A cache salt is part "
            "of them already. Also accepted as `seq_hashes`.",
            json_schema_extra={"items": {"anyOf": [{"type": "integer"}, {"type": "string"}]}},
        ),
    ] = None
    block_size: Annotated[int | None, Field(gt=0, description="Tokens a block, with `hashes`.")] = None
    prompt_tokens: Annotated[
        int | None, Field(gt=0, lt=MOST_TOKENS, description="Length of the whole prompt, with `hashes`.")
    ] = None
    request_id: Annotated[str, Field(description="Yours; comes back in answers.")] = ""
    max_output_tokens: Annotated[
        int | None, Field(gt=0, lt=MOST_TOKENS, description="Bound of the answer.")
    ] = None
    streamed: Annotated[bool, Field(description="Whether the first token's time will be seen.")] = True
    cache_salt: Annotated[str | None, Field(description="Keeps this prompt's cache apart.")] = None
    tenant: Annotated[str, Field(min_length=1, description="Whose request, for answer lengths.")] = "default"
    cache_tenant: Annotated[
        str, Field(min_length=1, description="The part of engines' caches, where they keep tenants apart.")
    ] = "default"
    route: Annotated[
        str, Field(description="The kind of work; answer lengths and returns are learned by it.")
    ] = ""
    session: Annotated[str | None, Field(description="The conversation that this continues.")] = None
    priority: Annotated[int, Field(ge=-8, le=8, description="Higher goes first.")] = 0
    objectives: Annotated[
        ObjectivesQuery, Field(description="What this request should meet: `ttft_s` and `tbt_s`, seconds.")
    ] = ObjectivesQuery()
    exclude: Annotated[list[str], Field(description="Instances that failed this request before.")] = []
    retry_of: Annotated[str | None, Field(description="The placement that failed.")] = None

    @model_validator(mode="after")
    def _one_prompt(self) -> PlacementQuery:
        forms = ("text", "messages", "token_ids", "hashes")
        given = [name for name in forms if getattr(self, name) is not None]
        if len(given) != 1:
            found = " and ".join(given) or "none"
            raise ValueError(
                f"give the prompt in one form: text, messages, token_ids or hashes (given: {found})"
            )
        if self.hashes is not None:
            if self.block_size is None:
                raise ValueError("block_size: is required with hashes")
            if self.prompt_tokens is None:
                raise ValueError("prompt_tokens: is required with hashes")
            if len(self.hashes) * self.block_size > self.prompt_tokens:
                raise ValueError(
                    f"prompt_tokens: {len(self.hashes)} blocks of {self.block_size} tokens are more than "
                    f"{self.prompt_tokens} tokens; give the length of the whole prompt"
                )
        elif self.block_size is not None or self.prompt_tokens is not None:
            raise ValueError("block_size and prompt_tokens belong to hashes; leave them out")
        if self.messages is None and (self.tools is not None or self.chat_template_kwargs is not None):
            raise ValueError("tools and chat_template_kwargs belong to messages; leave them out")
        return self


@dataclass(frozen=True, slots=True)
class TokenizedPrompt:
    """``fallback`` says why the tokens do not come from a better source."""

    tokens: Tokens
    source: TokenSource
    fallback: str | None = None


class Tokenize(Protocol):
    """Makes token ids of a prompt. ``document`` is the body of a completion or, with `messages`, a chat request."""

    async def __call__(self, document: dict[str, Any]) -> TokenizedPrompt | None:
        """None when there is no tokenizer for its model, or it failed."""
        ...


def prompt_document(query: PlacementQuery) -> dict[str, Any] | None:
    """The request body that an engine would be sent; None when nothing is to be tokenized."""
    if query.text is not None:
        return {"model": query.model, "prompt": query.text}
    if query.messages is not None:
        document: dict[str, Any] = {"model": query.model, "messages": query.messages}
        for name in ("tools", "chat_template_kwargs"):
            if getattr(query, name) is not None:
                document[name] = getattr(query, name)
        return document
    return None


def placement_request(query: PlacementQuery, tokenized: TokenizedPrompt | None) -> PlacementRequest:
    """What the scheduler is asked; ``tokenized`` for a prompt given as text or messages."""
    hashes: Hashes | None = None
    tokens, source = np.empty(0, np.uint32), TokenSource.CLIENT
    if tokenized is not None:
        tokens, source = tokenized.tokens, tokenized.source
    elif query.token_ids is not None:
        tokens = np.array(query.token_ids, np.uint32)
    else:
        hashes = np.array(query.hashes, np.uint64)
    return PlacementRequest(
        request_id=query.request_id,
        model=query.model,
        tokens=tokens,
        prompt_tokens=query.prompt_tokens or len(tokens),
        token_source=source,
        token_fallback=tokenized.fallback if tokenized is not None else None,
        streamed=query.streamed,
        max_output_tokens=query.max_output_tokens,
        cache_salt=query.cache_salt,
        tenant=query.tenant,
        cache_tenant=query.cache_tenant,
        route=query.route,
        session=query.session,
        priority=query.priority,
        ttft_objective_s=query.objectives.ttft_s,
        tbt_objective_s=query.objectives.tbt_s,
        hashes=hashes,
        hashes_block_size=query.block_size,
        excluded=frozenset(query.exclude),
        retry_of=query.retry_of,
    )
