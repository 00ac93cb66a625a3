"""The conductor's end: takes workers' requests for placements and their reports, and answers them.

All messages of one read are handled together and answered in one write.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from math import inf
from pathlib import Path

import msgspec
import structlog

from conductor.placement import Placement, PlacementError, RejectedError
from router.api_keys import ApiKey
from router.errors import internal_error
from router.refusals import AnsweredError
from router.server import private_socket
from router.services import RouterServices
from router.workers.frames import FrameError, FrameReader, frame
from router.workers.grants import WorkerGrants
from router.workers.messages import (
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
    Keys,
    Leave,
    MadePlacement,
    MessageError,
    MetricFamily,
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
    from_worker,
    refusal_of,
)

logger = structlog.get_logger("router")

_MOST_COLLECTING = 8  # questions for metrics that a worker may owe an answer to


class PlacementDesk:
    """Serves every worker from the placements, the line and the keys of ``services``.

    A worker whose connection closes is gone: its placements are cancelled, those it waits for leave the line,
    its requests no longer count against their keys' limits.
    """

    def __init__(self, services: RouterServices, setup: Setup) -> None:
        self.services = services
        self.setup = setup
        self.on_samples: Callable[[int, list[MetricFamily]], None] = lambda worker, families: None
        self.on_gone: Callable[[int], None] = lambda worker: None
        self.on_silent: Callable[[int, int], None] = lambda worker, pid: None
        self.links: set[WorkerLink] = set()
        self._server: asyncio.Server | None = None
        self._path: Path | None = None

    async def start(self, path: Path) -> None:
        """Listen on a Unix socket that only this user can reach. Raises OSError."""
        listening = private_socket(path)
        self._path = path
        self._server = await asyncio.get_running_loop().create_unix_server(
            lambda: WorkerLink(self), sock=listening
        )

    def close(self) -> None:
        """Disconnect every worker, which ends them."""
        if self._server is not None:
            self._server.close()
        for link in list(self.links):
            link.close()
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    def ready_workers(self) -> dict[int, int]:
        """Process ids of the workers that accept requests."""
        return {link.worker: link.pid for link in self.links if link.ready}

    def instance_lost(self, instance_id: str, reason: str) -> None:
        """Workers place again what waits for an instance that is down."""
        for link in self.links:
            if link.greeted:
                link.send(InstanceLost(instance_id, reason))

    def use_keys(self, keys: list[ApiKey]) -> None:
        """Workers know these from now on."""
        self.setup = msgspec.structs.replace(self.setup, keys=keys)
        for link in self.links:
            if link.greeted:
                link.send(Keys(keys))

    async def collect(self, within_s: float) -> None:
        """Ask every worker for its metrics; one that does not answer in time keeps its former ones."""
        answers = [link.collect() for link in self.links if link.ready]
        if answers:
            await asyncio.wait(answers, timeout=within_s)

    async def collect_forever(self, every_s: float, silent_after_s: float = inf) -> None:
        """So that little is lost of a worker that dies, and one that has stopped is noticed.

        ``on_silent`` is told of a worker, with its process id, that has sent nothing for so long, however often it
        was asked: time in which this process itself stood still does not count.
        """
        while True:
            await asyncio.sleep(every_s)
            self.services.metrics.settle()
            for link in list(self.links):
                if link.ready:
                    link.unheard += 1
                    if link.unheard * every_s > silent_after_s:
                        self.on_silent(link.worker, link.pid)
                    link.collect()


class _Asked:
    """A request that a worker wants placed; stands in the line where its client cannot."""

    __slots__ = ("grant", "link", "ticket")

    def __init__(self, link: WorkerLink, ticket: int, grant: int) -> None:
        self.link = link
        self.ticket = ticket
        self.grant = grant

    def placed(self, placement: Placement) -> None:
        self.link.placed(self, placement)

    def refused(self, error: PlacementError) -> None:
        self.link.refused(self, error)


class WorkerLink(asyncio.Protocol):
    """One worker's connection."""

    def __init__(self, desk: PlacementDesk) -> None:
        self.worker = -1
        self.pid = 0
        self.greeted = False
        self.ready = False
        self.unheard = 0  # times that it was asked since it last sent anything
        self._desk = desk
        self._services = desk.services
        self._clock = desk.services.clock
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._reader = FrameReader()
        self._unsent: list[bytes] = []
        self._grants = WorkerGrants(desk.services.keys)
        self._held: dict[int, _Asked] = {}
        self._active: set[str] = set()
        self._collecting: deque[asyncio.Future[None]] = deque()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport
        self._desk.links.add(self)

    def data_received(self, data: bytes) -> None:
        self.unheard = 0
        try:
            for payload in self._reader.feed(data):
                self._receive(from_worker(payload))
        except (FrameError, MessageError) as error:
            logger.error("a router worker sent what cannot be read", worker=self.worker, error=str(error))
            self.close()
        self._services.line.pump()
        self._flush()

    def connection_lost(self, exc: Exception | None) -> None:
        self._desk.links.discard(self)
        now_s = self._clock()
        for asked in self._held.values():
            self._services.line.leave(asked)
        for placement_id in self._active:
            self._report(self._services.placements.cancelled, placement_id, now_s)
        self._held.clear()
        self._active.clear()
        self._grants.end_all(now_s)
        while self._collecting:
            self._collecting.popleft().set_result(None)
        self._services.line.pump()
        if self.worker >= 0:
            self._desk.on_gone(self.worker)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def collect(self) -> asyncio.Future[None]:
        """Done when the worker has answered with figures from now on, or is gone."""
        if len(self._collecting) >= _MOST_COLLECTING:  # it does not answer at all
            return self._collecting[-1]
        answer = self._loop.create_future()
        self._collecting.append(answer)
        self.send(Collect())
        return answer

    def send(self, message: FromConductor) -> None:
        if not self._unsent:
            self._loop.call_soon(self._flush)
        self._unsent.append(frame(encode(message)))

    # What becomes of a request for a placement

    def placed(self, asked: _Asked, placement: Placement) -> None:
        self._held.pop(asked.ticket, None)
        if placement.placement_id:
            self._active.add(placement.placement_id)
        limits = self._grants.fields(asked.grant, self._clock())
        self.send(Placed(asked.ticket, MadePlacement.of(placement), limits))

    def refused(self, asked: _Asked, error: PlacementError) -> None:
        self._held.pop(asked.ticket, None)
        limits = self._grants.fields(asked.grant, self._clock())
        self.send(Refused(asked.ticket, refusal_of(error, self._services.placements.models), limits))

    # Messages

    def _receive(self, message: FromWorker) -> None:
        placements, now_s = self._services.placements, self._clock()
        match message:
            case Place():
                self._place(message, now_s)
            case FirstToken():
                self._report(placements.first_token, message.placement_id, now_s)
            case Finished():
                self._active.discard(message.placement_id)
                self._report(placements.finished, message.placement_id, now_s, message.usage)
            case PrefillFinished():
                self._prefill_finished(message.placement_id, now_s)
            case Enter():
                self._grants.enter(message, now_s)
            case GrantEnded():
                self._grants.end(message, now_s)
            case Leave():
                asked = self._held.pop(message.ticket, None)
                if asked is not None:
                    self._services.line.leave(asked)
            case Cancelled():
                self._active.discard(message.placement_id)
                self._report(placements.cancelled, message.placement_id, now_s)
            case Failed():
                self._active.discard(message.placement_id)
                self._report(placements.failed, message.placement_id, now_s, message.failure)
            case Samples():
                self._desk.on_samples(self.worker, message.families)
                if self._collecting:  # answers come in the order of the questions
                    self._collecting.popleft().set_result(None)
            case Hello():
                self.worker, self.pid, self.greeted = message.worker, message.pid, True
                self.send(Welcome(self._desk.setup))
            case Ping():
                self.send(Pong())
            case Ready():
                self.ready = True
                logger.info("router worker is ready", worker=self.worker, pid=self.pid)

    def _place(self, message: Place, now_s: float) -> None:
        request = message.request.request()
        asked = _Asked(self, message.ticket, message.grant)
        services = self._services
        try:
            if message.grant:
                taken = None if message.anywhere else request.prompt_tokens
                self._grants.check(message.grant, taken, now_s)
            if message.anywhere:
                placement = services.line.hold(asked, services.placements.anywhere(request, now_s))
            else:
                placement = services.line.arrive(asked, request, now_s)
        except PlacementError as error:
            self.refused(asked, error)
            return
        except MessageError:
            raise
        except Exception:
            logger.exception("placement failed unexpectedly", request_id=request.request_id)
            self.refused(asked, AnsweredError(internal_error()))
            return
        if placement is None:
            self._held[message.ticket] = asked
        else:
            services.metrics.placement_s.observe(self._clock() - now_s)
            self.placed(asked, placement)

    def _prefill_finished(self, placement_id: str, now_s: float) -> None:
        try:
            self._report(self._services.placements.prefill_finished, placement_id, now_s)
        except RejectedError as error:
            self._active.discard(placement_id)
            self.send(Revoked(placement_id, refusal_of(error, list)))

    def _report(self, report: Callable[..., None], *arguments: object) -> None:
        """A fault of the scheduler must not cost the worker its other requests."""
        try:
            report(*arguments)
        except RejectedError:
            raise
        except Exception:
            logger.exception("the scheduler failed", worker=self.worker, call=report.__name__)

    def _flush(self) -> None:
        unsent, self._unsent = self._unsent, []
        if unsent and self._transport is not None and not self._transport.is_closing():
            self._transport.write(b"".join(unsent))
