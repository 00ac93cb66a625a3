"""Token ids of a request's prompt: the client's own, the local tokenizer's, an engine's, or none.

Placement wants them to find cached prefixes; a request whose prompt cannot be tokenized is still served.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import httpx
import msgspec
import numpy as np
import structlog

from conductor.placement import Hashes, Tokens, TokenSource
from router.errors import TokenizationError
from router.inference import Body, Endpoint, InferenceRequest, first_prompt, truncated

if TYPE_CHECKING:
    from router.metrics import RouterMetrics
    from router.plain_chats import PlainChat, PlainChats, PlainPrompts
    from router.prompt_tokenizer import PromptTokenizer
    from router.token_cache import TokenCacheState

logger = structlog.get_logger("router")

ANY_MODEL = "*"
IN_THREAD_BYTES = 4_096  # half a millisecond of tokenization; handing over costs a tenth of that
_KNOWN_FACTOR = 64  # finding the tokens of known text takes so much less time than tokenizing it
_MOST_REASON_CHARACTERS = 200
CHARS_PER_TOKEN = 4  # estimate for prompts that were not tokenized
_THREADS = 2
_ENGINE_FIELDS = (
    "prompt",
    "messages",
    "tools",
    "add_special_tokens",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
    "chat_template_kwargs",
)

NO_TOKENS: Tokens = np.empty(0, dtype=np.uint32)


class Prompt(msgspec.Struct, frozen=True, gc=False):
    """``prompt_tokens`` is exact, or an estimate when ``source`` is ``none``.

    ``fallback`` says why no better source was used, where there is one. ``known_hashes`` are as those of the
    `PlacementRequest`.
    """

    tokens: Tokens
    prompt_tokens: int
    source: TokenSource
    fallback: str | None = None
    known_hashes: dict[int, Hashes] = {}


class EngineTokenizer:
    """vLLM's POST /tokenize. ``url_for`` names an instance (``http://host:port``) that serves a model;
    the model itself is not sent, for the client may know it by an alias."""

    def __init__(
        self,
        client: httpx.AsyncClient,
        url_for: Callable[[str], Awaitable[str | None]],
        *,
        timeout_s: float = 2.0,
    ) -> None:
        self._client = client
        self._url_for = url_for
        self._timeout_s = timeout_s

    async def tokens(self, request: InferenceRequest) -> Tokens | None:
        """None when no instance can be asked. Raises TokenizationError."""
        url = await self._url_for(request.model)
        if url is None:
            return None
        document = request.document
        asked = {name: document[name] for name in _ENGINE_FIELDS if name in document}
        if "prompt" in asked:
            asked["prompt"] = first_prompt(asked["prompt"])
        try:
            answer = await self._client.post(f"{url}/tokenize", json=asked, timeout=self._timeout_s)
            answer.raise_for_status()
            tokens = np.array(answer.json()["tokens"], dtype=np.uint32)
            if tokens.ndim != 1:
                raise ValueError(f"'tokens' is no list of token ids: it has {tokens.ndim} dimensions")
            return tokens
        except (httpx.HTTPError, ValueError, KeyError, TypeError, OverflowError) as error:
            raise TokenizationError(f"{url}/tokenize: {error or type(error).__name__}") from error


class TokenService:
    """Chooses the best source of tokens for a request: the client, a local tokenizer, an engine, or none.

    ``tokenizers`` maps the names that clients use to tokenizers; the one under ``"*"`` serves all others.
    More than ``in_thread_bytes`` of new text are tokenized off the event loop.
    """

    def __init__(
        self,
        tokenizers: Mapping[str, PromptTokenizer] | None = None,
        *,
        engine: EngineTokenizer | None = None,
        metrics: RouterMetrics | None = None,
        in_thread_bytes: int = IN_THREAD_BYTES,
    ) -> None:
        self._tokenizers = dict(tokenizers or {})
        self._engine = engine
        self._metrics = metrics
        self._in_thread_bytes = in_thread_bytes
        self._threads: ThreadPoolExecutor | None = None
        self._logged: set[tuple[str, TokenSource]] = set()
        self._plain: PlainChats | None = None
        # Reads a chat's body without parsing it; None where it must be parsed, whatever is in it.
        self.plain_chat: Callable[[Body], PlainChat | None] = _not_plain
        if any(each.plain is not None for each in self._tokenizers.values()):
            from router.plain_chats import PlainChats

            self._plain = PlainChats(self._plain_prompts)
            self.plain_chat = self._plain.read
        if metrics is not None:
            metrics.token_caches = self._cache_states

    def prompt_at_once(self, request: InferenceRequest) -> Prompt | None:
        """The prompt where that takes no waiting and little time; None where :meth:`prompt` must be used."""
        document = request.document
        if request.endpoint is Endpoint.COMPLETIONS:
            given = first_prompt(document.get("prompt"))
            if isinstance(given, list):
                return self._client_tokens(request, given)
        tokenizer = self._tokenizer(request.model)
        if tokenizer is None:
            return None if self._engine is not None else untokenized(request, _no_tokenizer(request))
        if len(request.body) > self._in_thread_bytes * _KNOWN_FACTOR:
            return None
        try:
            tokens = tokenizer.tokens_if_known(request, self._in_thread_bytes)
        except Exception:  # met again, and counted, where the next source is tried
            return None
        return None if tokens is None else tokenized(tokens, TokenSource.LOCAL)

    async def prompt(self, request: InferenceRequest, *, plain: bool = False) -> Prompt:
        """The prompt from the best source that works. Never raises on account of the prompt.

        A ``plain`` chat that takes too long to be tokenized at once need not be parsed for it.
        """
        tokenizer = self._tokenizer(request.model)
        fallback = _no_tokenizer(request)
        if tokenizer is not None:
            if self._threads is None:
                self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="tokenize")
            loop = asyncio.get_running_loop()
            try:
                tokens = await loop.run_in_executor(self._threads, self._tokenized, tokenizer, request, plain)
                return tokenized(tokens, TokenSource.LOCAL)
            except Exception as error:  # templates are programs and may fail in any way
                fallback = self._failed(request, TokenSource.LOCAL, error)
        if self._engine is None:
            return untokenized(request, fallback)
        try:
            engine_tokens = await self._engine.tokens(request)
        except TokenizationError as error:
            return untokenized(request, f"{fallback}; {self._failed(request, TokenSource.ENGINE, error)}")
        if engine_tokens is None:
            return untokenized(request, f"{fallback}; engine: no instance serves the model")
        return tokenized(truncated(engine_tokens, request.document), TokenSource.ENGINE, fallback)

    def _tokenized(self, tokenizer: PromptTokenizer, request: InferenceRequest, plain: bool) -> Tokens:
        tokens = None
        if plain and self._plain is not None:
            tokens = self._plain.tokenize(request.body)
        return tokenizer.tokens(request) if tokens is None else tokens

    def _plain_prompts(self, model: str) -> PlainPrompts | None:
        tokenizer = self._tokenizer(model)
        return None if tokenizer is None else tokenizer.plain

    def close(self) -> None:
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
            self._threads = None

    def _tokenizer(self, model: str) -> PromptTokenizer | None:
        return self._tokenizers.get(model) or self._tokenizers.get(ANY_MODEL)

    def _cache_states(self) -> dict[str, TokenCacheState]:
        """By the first name of each tokenizer."""
        named = {tokenizer: name for name, tokenizer in reversed(self._tokenizers.items())}
        return {name: tokenizer.cache_state() for tokenizer, name in named.items()}

    def _client_tokens(self, request: InferenceRequest, token_ids: list[Any]) -> Prompt:
        try:
            tokens = np.array(token_ids, dtype=np.uint32)
        except (ValueError, TypeError, OverflowError) as error:
            failure = TokenizationError(f"not a list of token ids: {error}")
            return untokenized(request, self._failed(request, TokenSource.CLIENT, failure))
        return tokenized(truncated(tokens, request.document), TokenSource.CLIENT)

    def _failed(self, request: InferenceRequest, source: TokenSource, error: Exception) -> str:
        """Count and log a failure; says which source failed and why."""
        if self._metrics is not None:
            self._metrics.tokenization_failures[source] += 1
        key = (request.model, source)
        if key not in self._logged and len(self._logged) < 1_000:
            self._logged.add(key)
            logger.warning(
                "prompt not tokenized; further failures of this kind are only counted",
                model=request.model,
                source=source.value,
                error=_reason(error),
            )
        return failure_of(source, error)


def _not_plain(body: Body) -> None:
    """Of all chats, where no tokenizer is fit for reading them so."""


def failure_of(source: TokenSource, error: Exception) -> str:
    """Which source failed and why, for :attr:`Prompt.fallback`."""
    return f"{source.value}: {_reason(error)[:_MOST_REASON_CHARACTERS]}"


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__


def tokenized(
    tokens: Tokens,
    source: TokenSource,
    fallback: str | None = None,
    known_hashes: dict[int, Hashes] | None = None,
) -> Prompt:
    """Of a request whose token ids are known."""
    return Prompt(tokens, len(tokens), source, fallback, {} if known_hashes is None else known_hashes)


def untokenized(request: InferenceRequest, fallback: str | None) -> Prompt:
    """Of a request that load alone places."""
    return Prompt(NO_TOKENS, max(1, len(request.body) // CHARS_PER_TOKEN), TokenSource.NONE, fallback)


def _no_tokenizer(request: InferenceRequest) -> str:
    return f"local: no tokenizer is configured for {request.model!r}"
