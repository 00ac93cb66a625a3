"""Placements of whichever conductor answers; without any, by lot between this router's instances.

One conductor at a time is asked, the first of the list to begin with, and another when it is gone: its connection
closed, or nothing came for `SILENT_S` though it was asked to, time in which this process itself stood still not
counted. What it had not answered is asked again.
Requests that it had placed go on; what becomes of them it is not told any more.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from random import Random
from typing import Final

import numpy as np
import structlog

from conductor.placement import (
    Held,
    InstanceFailure,
    ModelCard,
    Placement,
    PlacementError,
    PlacementRequest,
    Released,
    Usage,
)
from router.accounts import UNLIMITED, Account, TenantCounts
from router.api_keys import ApiKey
from router.services import RouterServices
from router.workers.client import Asked, OneWaiter, PlacementClient
from router.workers.limits import RemoteAccount
from router.workers.local_choice import LocalChoice
from router.workers.messages import GrantEnded, Instances, Setup

logger = structlog.get_logger("router")

PING_S: Final = 0.2
SILENT_S: Final = 1.5
RECONNECT_S: Final = 0.25
CONNECT_WITHIN_S: Final = 1.0
WELCOME_WITHIN_S: Final = 10.0  # a conductor may be busy; nobody waits for it


class Conductor:
    """One of them, and the connection to it while there is one."""

    def __init__(self, host: str, port: int) -> None:
        self.host = host
        self.port = port
        self.link: PlacementClient | None = None
        self.setup: Setup | None = None
        self.told: Instances | None = None
        self.keys: list[ApiKey] | None = None  # where it read them again
        self.complained = False

    @property
    def name(self) -> str:
        return f"{self.host}:{self.port}"

    def rest_url(self) -> str | None:
        """Where its REST API is, seen from here."""
        if self.setup is None or self.link is None:
            return None
        scheme, _, address = self.setup.rest_socket.partition("://")
        host, _, port = address.rpartition(":")
        return f"{scheme}://{self.host if host in ('', '0.0.0.0', '[::]') else host}:{port}"


class Conductors:
    """The placement service and the dispatch of a router's front door."""

    def __init__(
        self, conductors: Sequence[Conductor], token: str, clock: Callable[[], float], random: Random
    ) -> None:
        self.conductors = tuple(conductors)
        self.local = LocalChoice(random)
        self.failovers = 0
        self._token = token
        self._clock = clock
        self._tickets = itertools.count(1)
        self._grants = itertools.count(1)
        self._accounts: dict[int, RemoteAccount] = {}
        self._placed: dict[str, tuple[Placement, PlacementClient | None]] = {}
        self._answers: list[Released] = []
        self._active: Conductor | None = None
        self._services: RouterServices | None = None
        self._keepers: list[asyncio.Task[None]] = []
        self._welcomed = asyncio.Event()
        self._closing = False

    # ---- connections ----

    def start(self) -> None:
        self._keepers = [asyncio.create_task(self._keep(each)) for each in self.conductors]

    async def welcomed(self) -> Setup:
        """What the first conductor that answers wants a router to know."""
        await self._welcomed.wait()
        return next(each.setup for each in self.conductors if each.setup is not None)

    def serve(self, services: RouterServices) -> None:
        """Answers go to these services."""
        self._services = services
        for each in self.conductors:
            if each.link is not None:
                each.link.serve(services, tuple)
        self._use_keys()

    async def close(self) -> None:
        self._closing = True
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)

    @property
    def active(self) -> Conductor | None:
        """Who is asked; None while nobody answers."""
        return self._active

    async def _keep(self, conductor: Conductor) -> None:
        """Stay connected to it."""
        while True:
            try:
                await self._stay(conductor)
            except (OSError, TimeoutError) as error:
                if not conductor.complained:
                    conductor.complained = True
                    logger.warning("a conductor is out of reach", conductor=conductor.name, reason=str(error))
            except Exception:  # a fault of ours must not cost the router its conductor for good
                logger.exception("the connection to a conductor failed", conductor=conductor.name)
            await asyncio.sleep(RECONNECT_S)

    async def _stay(self, conductor: Conductor) -> None:
        """Until it is gone. Raises OSError or TimeoutError where it is not there."""
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(CONNECT_WITHIN_S):
            _, client = await loop.create_connection(
                lambda: PlacementClient(self._tickets), conductor.host, conductor.port
            )
        try:
            client.greet(-1, os.getpid(), self._token, self._clock())
            client.on_instances = partial(self._told, conductor)
            client.on_keys = partial(self._told_keys, conductor)
            conductor.keys = None
            async with asyncio.timeout(WELCOME_WITHIN_S):
                conductor.setup = await client.welcomed
            if self._services is not None:
                client.serve(self._services, tuple)
            conductor.link, conductor.complained = client, False
            logger.info("a conductor answers", conductor=conductor.name)
            self._choose()
            self._welcomed.set()
            while not client.lost.done() and client.unheard * PING_S <= SILENT_S:
                client.unheard += 1
                client.ping()
                with suppress(TimeoutError):
                    async with asyncio.timeout(PING_S):
                        await asyncio.shield(client.lost)
        finally:
            client.abort()
            if not client.lost.done():
                await client.lost
            conductor.link = None  # not before: who leaves meanwhile must be let go there
            if client.welcomed.done():
                client.welcomed.exception()
            self._lost(conductor, client)

    def _choose(self) -> None:
        if self._active is None or self._active.link is None:
            self._active = next((each for each in self.conductors if each.link is not None), None)
            if self._active is not None and self._active.told is not None:
                self.local.know(self._active.told)
            self._use_keys()

    def _told(self, conductor: Conductor, told: Instances) -> None:
        """Who can take requests, by the conductor that is asked."""
        conductor.told = told
        if conductor is self._active or not self.local.knows_any:
            self.local.know(told)

    def _told_keys(self, conductor: Conductor, keys: list[ApiKey]) -> None:
        """They were read again there."""
        conductor.keys = keys
        if conductor is self._active:
            self._use_keys()

    def _use_keys(self) -> None:
        """Those of the conductor that is asked, which may have begun anew with others."""
        active, services = self._active, self._services
        if services is None or active is None or active.setup is None:
            return
        keys = (active.setup.keys if active.keys is None else active.keys) or []
        if keys != ([] if services.keys is None else list(services.keys.keys)):
            services.use_keys(keys)

    def _lost(self, conductor: Conductor, client: PlacementClient) -> None:
        """Ask somebody else for what it has not answered."""
        self._placed = {
            name: (placement, None if owner is client else owner)
            for name, (placement, owner) in self._placed.items()
        }
        for released in client.release(0.0):
            self._answers.append(released)
            if isinstance(released.outcome, Placement):
                self._began(released.outcome, None)
        unanswered = client.take_unanswered()
        if self._active is conductor and not self._closing:
            self.failovers += 1
            self._choose()
            logger.warning(
                "a conductor is gone",
                conductor=conductor.name,
                now="this router alone" if self._active is None else self._active.name,
                unanswered=len(unanswered),
            )
        for ticket, asked in unanswered.items():
            self._ask(ticket, asked)
        if self._services is not None:
            self._services.line.pump()

    # ---- keys with limits ----

    def make_account(self, key: ApiKey, tenant: TenantCounts) -> Account:
        """Keys without limits need nobody's permission."""
        if key.limits == UNLIMITED:
            return Account(key.name, key.limits, tenant)
        return RemoteAccount(key.name, tenant, self)

    def entered(self, account: RemoteAccount) -> int:
        grant = next(self._grants)
        self._accounts[grant] = account
        return grant

    def ended(self, ended: GrantEnded) -> None:
        self._accounts.pop(ended.grant, None)
        for each in self.conductors:
            if each.link is not None:
                each.link.ended(ended)

    # ---- PlacementService and Dispatch ----

    def place(self, request: PlacementRequest, now_s: float) -> Placement | Held:
        return self._asked(Asked(request, anywhere=False))

    arrive = place

    def anywhere(self, request: PlacementRequest, now_s: float) -> Placement | Held:
        return self._asked(Asked(request, anywhere=True))

    async def any_url(self, model: str) -> str | None:
        """Of an instance that serves the model and can be asked for something that is no load."""
        if self._services is None:
            return None
        waiter = OneWaiter()
        request = PlacementRequest("", model, np.empty(0, np.uint32), 0, streamed=False)
        try:
            placement = self._services.line.hold(waiter, self.anywhere(request, 0.0)) or await waiter.answer
        except PlacementError:
            return None
        finally:
            self._services.line.leave(waiter)
        return placement.prefill.url

    def leave(self, ticket: int) -> None:
        for each in self.conductors:
            if each.link is not None:
                each.link.leave(ticket)
        for released in [each for each in self._answers if each.ticket == ticket]:
            self._answers.remove(released)
            if isinstance(released.outcome, Placement):
                self._ended(released.outcome.placement_id)

    def release(self, now_s: float) -> list[Released]:
        answers, self._answers = self._answers, []
        for each in self.conductors:
            if each.link is not None:
                for released in each.link.release(now_s):
                    answers.append(released)
                    if isinstance(released.outcome, Placement):
                        self._began(released.outcome, each.link)
        return answers

    def next_wakeup_s(self, now_s: float) -> float | None:
        return now_s if self._answers else None

    def prefill_finished(self, placement_id: str, now_s: float) -> None:
        if (client := self._owner(placement_id)) is not None:
            client.prefill_finished(placement_id, now_s)

    def first_token(self, placement_id: str, now_s: float) -> None:
        if (client := self._owner(placement_id)) is not None:
            client.first_token(placement_id, now_s)

    def finished(self, placement_id: str, now_s: float, usage: Usage) -> None:
        if (client := self._ended(placement_id)) is not None:
            client.finished(placement_id, now_s, usage)

    def cancelled(self, placement_id: str, now_s: float) -> None:
        if (client := self._ended(placement_id)) is not None:
            client.cancelled(placement_id, now_s)

    def failed(self, placement_id: str, now_s: float, failure: InstanceFailure) -> None:
        self.local.failed(failure, now_s)
        client = self._ended(placement_id)
        if client is None and self._active is not None:
            client = self._active.link  # it counts against the instance
        if client is not None:
            client.failed(placement_id, now_s, failure)

    def models(self) -> list[ModelCard]:
        active = self._active
        told = [] if active is None or active.link is None else active.link.models()
        return told or self.local.models()

    # ---- inside ----

    def _asked(self, asked: Asked) -> Placement | Held:
        """Raises PlacementError where this router decides alone."""
        if self._active is None:
            return self._place_here(asked)
        ticket = next(self._tickets)
        self._ask(ticket, asked)
        return Held(ticket)

    def _ask(self, ticket: int, asked: Asked) -> None:
        """The active conductor, or oneself."""
        active = self._active
        if active is not None and active.link is not None:
            account = self._accounts.get(asked.request.grant)
            if account is not None:
                active.link.enter(asked.request.grant, account)
            active.link.ask(ticket, asked)
            return
        try:
            outcome: Placement | PlacementError = self._place_here(asked)
        except PlacementError as error:
            outcome = error
        self._answers.append(Released(ticket, outcome))

    def _place_here(self, asked: Asked) -> Placement:
        placement = self.local.place(asked.request, self._clock(), reserve=not asked.anywhere)
        self._began(placement, None)
        return placement

    def _began(self, placement: Placement, client: PlacementClient | None) -> None:
        if placement.placement_id:
            self._placed[placement.placement_id] = (placement, client)
            self.local.began(placement)

    def _owner(self, placement_id: str) -> PlacementClient | None:
        return self._placed.get(placement_id, (None, None))[1]

    def _ended(self, placement_id: str) -> PlacementClient | None:
        placement, client = self._placed.pop(placement_id, (None, None))
        if placement is not None:
            self.local.ended(placement)
        return client
