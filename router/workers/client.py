"""A worker's end of its connection to the conductor: the placement service and the dispatch of its front door.

Everything that is asked and told in one turn of the event loop travels in one write.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import structlog

from conductor.placement import (
    Held,
    InstanceFailure,
    ModelCard,
    NoInstanceError,
    Placement,
    PlacementError,
    PlacementRequest,
    Released,
    Tokens,
    Usage,
)
from router.accounts import UNLIMITED, Account, TenantCounts
from router.api_keys import ApiKey
from router.services import RouterServices
from router.workers.frames import FrameError, FrameReader, frame
from router.workers.limits import RemoteAccount
from router.workers.messages import (
    AskedPlacement,
    Cancelled,
    Collect,
    Enter,
    Failed,
    Finished,
    FirstToken,
    FromConductor,
    FromWorker,
    GrantEnded,
    Hello,
    InstanceLost,
    Instances,
    Keys,
    Leave,
    MessageError,
    MetricFamily,
    ModelUnknown,
    Ping,
    Place,
    Placed,
    Pong,
    PrefillFinished,
    Ready,
    Refused,
    Revoked,
    Samples,
    Setup,
    Welcome,
    encode,
    error_of,
    from_conductor,
)

logger = structlog.get_logger("router")


_NO_TOKENS: Tokens = np.empty(0, np.uint32)


@dataclass(frozen=True, slots=True)
class Asked:
    """A request that waits for the answer of a conductor."""

    request: PlacementRequest
    anywhere: bool


class OneWaiter:
    """Waits for a placement as a coroutine does."""

    def __init__(self) -> None:
        self.answer: asyncio.Future[Placement] = asyncio.get_running_loop().create_future()

    def placed(self, placement: Placement) -> None:
        if not self.answer.done():
            self.answer.set_result(placement)

    def refused(self, error: PlacementError) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)


class PlacementClient(asyncio.Protocol):
    """Made by :func:`connect`; call ``serve`` before requests are accepted.

    ``lost`` is done when the conductor is gone.
    """

    def __init__(self, tickets: Iterator[int] | None = None) -> None:
        """``tickets`` are those of all connections that share a line."""
        loop = asyncio.get_running_loop()
        self.lost: asyncio.Future[None] = loop.create_future()
        self.welcomed: asyncio.Future[Setup] = loop.create_future()
        self._loop = loop
        self._transport: asyncio.Transport | None = None
        self._reader = FrameReader()
        self._unsent: list[bytes] = []
        self._tickets = itertools.count(1) if tickets is None else tickets
        self._grants = itertools.count(1)
        self._asked: dict[int, Asked] = {}
        self._charged: dict[int, RemoteAccount] = {}  # by grants under way
        self._answers: list[Released] = []
        self._models: list[ModelCard] = []
        self._services: RouterServices | None = None
        self._families: Callable[[], Iterable[MetricFamily]] = tuple
        self._keys: list[ApiKey] | None = None  # told before there were services
        self.unheard = 0  # pings since anything came last
        self.on_instances: Callable[[Instances], None] = lambda told: None
        self.on_keys: Callable[[list[ApiKey]], None] = self.use_keys

    def serve(self, services: RouterServices, families: Callable[[], Iterable[MetricFamily]]) -> None:
        """Answers go to these services; ``families`` are the metrics that the conductor asks for."""
        self._services = services
        self._families = families
        if self._keys is not None:
            services.use_keys(self._keys)

    def make_account(self, key: ApiKey, tenant: TenantCounts) -> Account:
        """Keys without limits need nobody's permission."""
        if key.limits == UNLIMITED:
            return Account(key.name, key.limits, tenant)
        return RemoteAccount(key.name, tenant, self)

    def use_keys(self, keys: list[ApiKey]) -> None:
        """Those of clients were read again."""
        if self._services is None:
            self._keys = keys
        else:
            self._services.use_keys(keys)

    def greet(self, worker: int, pid: int, token: str = "", clock_s: float = 0.0) -> None:
        self._send(Hello(worker, pid, token, clock_s))

    def ping(self) -> None:
        self._send(Ping())

    def abort(self) -> None:
        """It does not answer: hang up."""
        if self._transport is not None:
            self._transport.abort()

    def ready(self) -> None:
        self._send(Ready())

    async def close(self) -> None:
        """Say the last figures and what is unsent, then leave."""
        if self._transport is not None and not self._transport.is_closing():
            self._send(Samples(list(self._families())))
            self._flush()
            self._transport.close()
        await self.lost

    # GrantKeeper

    def entered(self, account: RemoteAccount) -> int:
        grant = next(self._grants)
        self.enter(grant, account)
        return grant

    def enter(self, grant: int, account: RemoteAccount) -> None:
        """A request of the account begins, if that was not told before."""
        if grant not in self._charged:
            self._charged[grant] = account
            self._send(Enter(grant, account.name))

    def ended(self, ended: GrantEnded) -> None:
        """Of a request that was entered here; of others this conductor need not know."""
        if self._charged.pop(ended.grant, None) is not None:
            self._send(ended)

    # PlacementService and Dispatch

    def place(self, request: PlacementRequest, now_s: float) -> Held:
        return self._ask(request, anywhere=False)

    arrive = place

    def anywhere(self, request: PlacementRequest, now_s: float) -> Held:
        return self._ask(request, anywhere=True)

    async def any_url(self, model: str) -> str | None:
        """Of an instance that serves the model and can be asked for something that is no load."""
        if self._services is None:
            return None
        waiter = OneWaiter()
        request = PlacementRequest("", model, _NO_TOKENS, 0, streamed=False)
        try:
            self._services.line.hold(waiter, self.anywhere(request, 0.0))
            placement = await waiter.answer
        except PlacementError:
            return None
        finally:
            self._services.line.leave(waiter)
        return placement.prefill.url

    def leave(self, ticket: int) -> None:
        if self._asked.pop(ticket, None) is not None:
            self._send(Leave(ticket))

    def release(self, now_s: float) -> list[Released]:
        answers, self._answers = self._answers, []
        return answers

    def next_wakeup_s(self, now_s: float) -> float | None:
        return None

    def prefill_finished(self, placement_id: str, now_s: float) -> None:
        """Admission may revoke the placement a little later."""
        if placement_id:
            self._send(PrefillFinished(placement_id))

    def first_token(self, placement_id: str, now_s: float) -> None:
        if placement_id:
            self._send(FirstToken(placement_id))

    def finished(self, placement_id: str, now_s: float, usage: Usage) -> None:
        if placement_id:
            self._send(Finished(placement_id, usage))

    def cancelled(self, placement_id: str, now_s: float) -> None:
        if placement_id:
            self._send(Cancelled(placement_id))

    def failed(self, placement_id: str, now_s: float, failure: InstanceFailure) -> None:
        self._send(Failed(placement_id, failure))

    def models(self) -> list[ModelCard]:
        """As the conductor told with its last refusal of an unknown model."""
        return self._models

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self.unheard = 0
        try:
            for payload in self._reader.feed(data):
                self._receive(from_conductor(payload))
        except (FrameError, MessageError) as error:
            logger.error("the conductor sent what cannot be read", error=str(error))
            assert self._transport is not None
            self._transport.abort()
            return
        if self._answers and self._services is not None:
            self._services.line.pump()
            self._answers.clear()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.welcomed.done():
            self.welcomed.set_exception(ConnectionResetError("the conductor hung up"))
        if not self.lost.done():
            self.lost.set_result(None)

    # inside

    def _ask(self, request: PlacementRequest, *, anywhere: bool) -> Held:
        """Raises NoInstanceError once the conductor is gone."""
        if self._transport is None or self._transport.is_closing():
            raise NoInstanceError("the conductor has stopped")
        ticket = next(self._tickets)
        self.ask(ticket, Asked(request, anywhere))
        return Held(ticket)

    def ask(self, ticket: int, asked: Asked) -> None:
        request = asked.request
        self._send(Place(ticket, AskedPlacement.of(request), asked.anywhere, request.grant))
        self._asked[ticket] = asked

    def take_unanswered(self) -> dict[int, Asked]:
        """What was asked here, for somebody else to answer."""
        asked, self._asked = self._asked, {}
        return asked

    def _receive(self, message: FromConductor) -> None:
        match message:
            case Placed():
                self._answered(message.ticket, message.placement.placement(), message.limits)
            case Refused():
                if isinstance(message.refusal, ModelUnknown):
                    self._models = message.refusal.served
                self._answered(message.ticket, error_of(message.refusal), message.limits)
            case Collect():
                self._send(Samples(list(self._families())))
            case Revoked():
                if self._services is not None:
                    self._services.placement_revoked(message.placement_id, error_of(message.refusal))
            case InstanceLost():
                if self._services is not None:
                    self._services.instance_lost(message.instance_id, message.reason)
            case Instances():
                self.on_instances(message)
            case Keys():
                self.on_keys(message.keys)
            case Pong():
                pass
            case Welcome():
                if not self.welcomed.done():
                    self.welcomed.set_result(message.setup)

    def _answered(self, ticket: int, outcome: Placement | PlacementError, limits: str) -> None:
        asked = self._asked.pop(ticket, None)
        if asked is not None:
            account = self._charged.get(asked.request.grant)
            if account is not None:
                account.latest_fields = limits
            self._answers.append(Released(ticket, outcome))
        elif isinstance(outcome, Placement):  # its client left while the answer was under way
            self.cancelled(outcome.placement_id, 0.0)

    def _send(self, message: FromWorker) -> None:
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        if not self._unsent:
            self._loop.call_soon(self._flush)
        self._unsent.append(frame(encode(message)))

    def _flush(self) -> None:
        unsent, self._unsent = self._unsent, []
        transport = self._transport
        if unsent and transport is not None and not transport.is_closing():
            transport.write(b"".join(unsent))


async def connect(path: str, worker: int, pid: int) -> PlacementClient:
    """Greet the conductor at a Unix socket; its answer is awaited with ``welcomed``. Raises OSError."""
    _, client = await asyncio.get_running_loop().create_unix_connection(PlacementClient, path)
    client.greet(worker, pid)
    return client
