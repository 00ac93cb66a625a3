"""From a request as a gateway shows it to a pick: read, tokenized and placed as the front door does it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import orjson
from msgspec.structs import replace

from conductor.placement import Placement, PlacementError, PlacementRequest, Target, TokenSource
from router.disaggregation.bodies import forwarded_body
from router.errors import RequestError
from router.heads import Headers, client_request_id
from router.inference import PATHS, Body, Endpoint, InferenceRequest
from router.picks import Pick
from router.placement_question import placement_question
from router.placement_view import placement_view
from router.refusals import not_placed
from router.terms import parse_terms
from router.tokens import NO_TOKENS, Prompt, failure_of, tokenized, untokenized

if TYPE_CHECKING:
    from router.accounts import Grant
    from router.plain_chats import PlainChat
    from router.services import RouterServices

_NOTHING: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class GatewayRequest:
    """``excluded`` names instances that the gateway cannot send it to; ``sees_first_byte``: and tells of it."""

    path: bytes
    headers: Headers
    body: bytes | bytearray
    arrived_s: float
    excluded: frozenset[str] = _NOTHING
    sees_first_byte: bool = False


@dataclass(frozen=True, slots=True)
class Picked:
    """Where a request goes. ``body`` is what to send, None for what came.

    Without a ``pick`` nothing is reserved: it is no load.
    """

    placement: Placement
    asked: PlacementRequest
    pick: Pick | None
    body: Body | None = None
    grant: Grant | None = None

    @property
    def target(self) -> Target:
        """The instance that answers the client."""
        return self.placement.decode


def endpoint_of(path: bytes) -> Endpoint | None:
    """None for what is no inference that is known here."""
    return PATHS.get(path.partition(b"?")[0].decode("latin-1"))


class Turn:
    """Waits for a placement that is not made at once."""

    __slots__ = ("_outcome", "_told")

    def __init__(self) -> None:
        self._outcome: Placement | PlacementError | None = None
        self._told: asyncio.Event | None = None

    def placed(self, placement: Placement) -> None:
        self._tell(placement)

    def refused(self, error: PlacementError) -> None:
        self._tell(error)

    def _tell(self, outcome: Placement | PlacementError) -> None:
        self._outcome = outcome
        if self._told is not None:
            self._told.set()

    async def comes(self, services: RouterServices) -> Placement:
        """Raises PlacementError. Who waits no longer gives back what it got."""
        self._told = asyncio.Event()
        try:
            while self._outcome is None:
                await self._told.wait()
        except asyncio.CancelledError:
            services.line.leave(self)
            if isinstance(self._outcome, Placement) and self._outcome.placement_id:
                services.placements.cancelled(self._outcome.placement_id, services.clock())
            raise
        if isinstance(self._outcome, PlacementError):
            raise self._outcome
        return self._outcome


async def pick(services: RouterServices, given: GatewayRequest) -> Picked:
    """Raises RequestError, which is what to answer the client; nothing is reserved then."""
    grant = None
    key = None
    if services.keys is not None:
        key, account = services.keys.identify(given.headers)
        grant = account.enter(given.arrived_s)
    try:
        terms = parse_terms(given.headers, key)
        endpoint = endpoint_of(given.path)
        request_id = client_request_id(given.headers) or services.new_request_id()
        if endpoint is None:
            return await _pick_any(services, given, request_id, grant)
        request, chat = services.read(endpoint, given.body)
        if key is not None:
            key.check_model(request.model)
        prompt = await prompt_of(services, request, chat)
        if grant is not None and endpoint.computes:
            grant.take_tokens(prompt.prompt_tokens, services.clock())
        asked = placement_question(
            request,
            prompt,
            terms,
            request_id=request_id,
            arrived_s=given.arrived_s,
            streamed=request.stream and given.sees_first_byte,
        )
        if given.excluded:
            asked = replace(asked, excluded=given.excluded)
        placement = await _placed(services, asked, computes=endpoint.computes)
        if placement.disaggregated and not endpoint.generates:
            placement = replace(placement, decode=placement.prefill)  # nothing to hand over
        made = services.picks.begin(placement) if placement.placement_id else None
        try:
            count(services, prompt, placement, computes=endpoint.computes)
            body = forwarded_body(request, placement.model)
        except BaseException:
            if made is not None:
                made.cancelled()
            raise
        return Picked(placement, asked, made, None if body is given.body else body, grant)
    except BaseException:
        if grant is not None:
            grant.end(services.clock(), failed=True, prompt_tokens=None, output_tokens=None)
        raise


async def pick_again(
    services: RouterServices, picked: Picked, only: str, others: Iterable[str]
) -> Pick | None:
    """Reserve for a request that its gateway has sent to the instance ``only`` instead; None where that fails."""
    excluded = frozenset(others) - {only}
    asked = replace(picked.asked, excluded=excluded, retry_of=picked.placement.placement_id)
    try:
        return services.picks.begin(await _placed(services, asked, computes=True))
    except RequestError:
        return None


async def prompt_of(services: RouterServices, request: InferenceRequest, chat: PlainChat | None) -> Prompt:
    """Never raises on account of the prompt: load alone places what cannot be tokenized."""
    if chat is not None:
        if chat.tokens is None:
            return await services.tokens.prompt(request, plain=True)
        return tokenized(chat.tokens, TokenSource.LOCAL, None, chat.known_hashes)
    try:
        view = placement_view(request)
    except Exception as error:  # only the engine judges what is in messages and tools
        services.metrics.tokenization_failures[TokenSource.LOCAL] += 1
        return untokenized(request, failure_of(TokenSource.LOCAL, error))
    if view is None:
        return untokenized(request, None)
    return services.tokens.prompt_at_once(view) or await services.tokens.prompt(view)


def count(services: RouterServices, prompt: Prompt, placement: Placement, *, computes: bool) -> None:
    """In the metrics of the front door."""
    if computes:
        services.metrics.token_source[prompt.source] += 1
        services.metrics.prompt_tokens += prompt.prompt_tokens
        services.metrics.overlap_tokens += placement.overlap_tokens


async def _pick_any(
    services: RouterServices, given: GatewayRequest, request_id: str, grant: Grant | None
) -> Picked:
    """For what is no inference that is known here: an instance of the model that it names, or of any."""
    model = _model_named(given.body)
    if model is None:
        model = next((card.model for card in services.placements.models()), "")
    asked = PlacementRequest(request_id, model, NO_TOKENS, 0, TokenSource.NONE, excluded=given.excluded)
    return Picked(await _placed(services, asked, computes=False), asked, None, grant=grant)


def _model_named(body: bytes | bytearray) -> str | None:
    try:
        document: Any = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    model = document.get("model") if isinstance(document, dict) else None
    return model if isinstance(model, str) and model else None


async def _placed(services: RouterServices, asked: PlacementRequest, *, computes: bool) -> Placement:
    """Raises RequestError."""
    turn = Turn()
    started_s = services.clock()
    try:
        if computes:
            placement = services.line.arrive(turn, asked, started_s)
        else:
            placement = services.line.hold(turn, services.placements.anywhere(asked, started_s))
        if placement is None:
            placement = await turn.comes(services)
        else:
            services.metrics.placement_s.observe(services.clock() - started_s)
    except PlacementError as error:
        raise not_placed(error, asked.model, services.placements.models, ()) from None
    return placement
