"""What every request of the front door shares: placements, tokens, connections, metrics and deadlines."""

from __future__ import annotations

import asyncio
import itertools
import math
import os
import ssl
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import structlog

from conductor.placement import (
    Held,
    InstanceFailure,
    ModelCard,
    Placement,
    PlacementError,
    PlacementRequest,
    Usage,
)
from router.api_keys import ApiKey, KeyRing
from router.cors import CorsPolicy
from router.hedging import FirstBytes
from router.inference import Body, Endpoint, InferenceRequest, parse_inference
from router.known_bodies import KnownBodies
from router.known_heads import KnownHeads
from router.line import AtOnce, Dispatch, Line
from router.metrics import RouterMetrics
from router.outbox import Outbox
from router.picks import Picks
from router.refusals import model_not_named
from router.request_trace import Tracing
from router.retry_budget import RetryBudget
from router.settings import RouterSettings
from router.tenant_metrics import TenantMetrics
from router.tokens import TokenService
from router.upstream import UpstreamPool

if TYPE_CHECKING:
    from router.exchange import Exchange
    from router.plain_chats import PlainChat

logger = structlog.get_logger("router")

_REMEMBERED_S = 1.0


class PlacementService(Protocol):
    """The scheduler as the router sees it; calls are synchronous and come from the event loop's thread.

    Where the scheduler lives in another process, it holds every request, and the dispatch tells what became of it.

    A placement ends with exactly one of ``finished``, ``cancelled`` and ``failed``. ``cancelled`` also
    ends placements that an engine refused with a 4xx answer: nothing was computed and nothing is learned.
    """

    def place(self, request: PlacementRequest, now_s: float) -> Placement | Held:
        """Raises PlacementError."""

    def anywhere(self, request: PlacementRequest, now_s: float) -> Placement | Held:
        """Any instance of the model, for work that is no load: nothing is reserved and the placement has no id.

        Of what is told of it, only failures count, against the instance. Raises PlacementError.
        """

    def prefill_finished(self, placement_id: str, now_s: float) -> None:
        """Raises RejectedError when admission ends the placement here."""

    def first_token(self, placement_id: str, now_s: float) -> None: ...

    def finished(self, placement_id: str, now_s: float, usage: Usage) -> None: ...

    def cancelled(self, placement_id: str, now_s: float) -> None: ...

    def failed(self, placement_id: str, now_s: float, failure: InstanceFailure) -> None: ...

    def models(self) -> list[ModelCard]: ...


class RouterServices:
    """Built once per process. ``start`` needs a running event loop; ``close`` ends whatever is in progress.

    Without ``keys`` everybody is served; without ``cors`` browsers are told nothing. ``clock`` gives the
    monotonic seconds that placements, deadlines, limits and metrics are counted in.
    """

    def __init__(
        self,
        placements: PlacementService,
        *,
        settings: RouterSettings | None = None,
        tokens: TokenService | None = None,
        metrics: RouterMetrics | None = None,
        dispatch: Dispatch | None = None,
        keys: KeyRing | None = None,
        cors: CorsPolicy | None = None,
        tracing: Tracing | None = None,
        engine_tls: ssl.SSLContext | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.placements = placements
        self.line = Line(AtOnce(placements) if dispatch is None else dispatch, clock)
        self.settings = settings = settings or RouterSettings()
        self.metrics = metrics or RouterMetrics()
        self.picks = Picks(placements, self.line, clock)
        self.metrics.registry.register(self.picks)
        self.keys = keys
        self.cors = cors
        self.tracing = tracing
        if keys is not None:
            self.metrics.registry.register(TenantMetrics(keys.tenants))
        self.tokens = tokens or TokenService(metrics=self.metrics)
        self._known_bodies = KnownBodies()
        self.known_heads = KnownHeads()
        self.clock = clock
        self.outbox = Outbox()
        self.pool = UpstreamPool(
            self.outbox,
            connect_timeout_s=settings.connect_timeout_s,
            max_idle_connections=settings.max_idle_connections,
            idle_timeout_s=settings.idle_timeout_s,
            clock=clock,
            tls=engine_tls,
        )
        self.retry_budget = RetryBudget(settings.retry_ratio, settings.retry_burst)
        self.metrics.retry_tokens = self.retry_budget.tokens
        quantile = settings.hedge_quantile
        self.first_bytes = None if quantile is None else FirstBytes(quantile, settings.hedge_least_s)
        self.active: set[Exchange] = set()
        self.metrics.inflight_requests = lambda: len(self.active)
        request_ids = map(f"{os.urandom(6).hex()}-{{:x}}".format, itertools.count(1))
        self.new_request_id: Callable[[], str] = request_ids.__next__
        self._only_model, self._only_model_until_s = "", -math.inf
        self._timer: asyncio.TimerHandle | None = None
        shortest_s = min(
            settings.first_byte_timeout_s,
            settings.prefill_timeout_s,
            settings.transfer_timeout_s,
            settings.stall_timeout_s,
            settings.idle_timeout_s,
        )
        # How late a limit may begin, and its end be noticed.
        self._tick_s = min(0.25, max(0.01, shortest_s / 20))

    def start(self) -> None:
        """Begin to watch deadlines and idle connections."""
        if "numba" in sys.modules:  # which would cost a worker without tokenizers 54 MB
            from router import chunk_walk, framing

            framing.walk_chunks = chunk_walk.compiled_walk()
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._tick_s, self._tick)

    def close(self) -> None:
        """End every request in progress with an error and drop all connections to engines."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for exchange in list(self.active):
            exchange.shut_down()
        self.outbox.flush()
        self.picks.close()
        self.line.close()
        self.pool.close()
        self.tokens.close()

    def instance_lost(self, instance_id: str, reason: str) -> None:
        """An instance is down: requests that wait for it are placed again, as if it had refused them."""
        for exchange in list(self.active):
            exchange.instance_lost(instance_id, reason)

    def placement_revoked(self, placement_id: str, error: PlacementError) -> None:
        """Admission has ended a placement while its request was being sent on."""
        for exchange in list(self.active):
            exchange.placement_revoked(placement_id, error)

    def use_keys(self, keys: Sequence[ApiKey]) -> bool:
        """Know these from now on; whether that was done.

        A door that is open, or asks for keys, stays so: a mistake must not open it.
        """
        if (self.keys is None) != (not keys):
            logger.error(
                "the keys stay as they were: a front door asks for keys, or for none, until it stops",
                remedy="restart it",
            )
            return False
        if self.keys is not None and keys:
            self.keys.replace(keys)
            logger.info("keys were read again", keys=len(keys))
        return True

    def only_model(self) -> str:
        """The model that is served here, where it is one only, adapters and aliases apart.

        Remembered for a second: asking goes through all instances. Raises RequestError where there are several
        (400) or none yet (503).
        """
        now_s = self.clock()
        if now_s >= self._only_model_until_s:
            models = [card.model for card in self.placements.models() if card.parent is None]
            if len(models) != 1:
                raise model_not_named(models)
            self._only_model, self._only_model_until_s = models[0], now_s + _REMEMBERED_S
        return self._only_model

    def read(self, endpoint: Endpoint, body: Body) -> tuple[InferenceRequest, PlainChat | None]:
        """A request, and what is known of its prompt without parsing it. Raises RequestError (400)."""
        chat = self.tokens.plain_chat(body) if endpoint is Endpoint.CHAT else None
        if chat is not None:
            return chat.request, chat
        if isinstance(body, memoryview):
            body = bytes(body)
        return parse_inference(endpoint, body, self.only_model, read=self._known_bodies.read), None

    def _tick(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._tick_s, self._tick)
        now_s = self.clock()
        for exchange in list(self.active):
            exchange.check_deadline(now_s)
        self.pool.sweep()
        self.metrics.settle()
