"""Runs an engine in real time: sleeps its steps, hands out its tokens, publishes its events."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from math import inf
from typing import Final

from simulator.engine import Engine
from simulator.kv_cache import KvEvent
from simulator.sequence import Sequence, Submission

# A step ends at the previous end plus its duration even if the loop woke late, so that lateness does not add
# up. Debt beyond this is forgiven: after a stall the engine should not race.
FORGIVEN_LAG_S: Final = 0.25


class RequestFailed(Exception):
    """The engine gave up on a request; the client gets HTTP 500."""


class Progress:
    """Where a request's handler waits for tokens of its sequences (its choices)."""

    __slots__ = ("_failure", "_ready", "_waiter")

    def __init__(self) -> None:
        self._ready: list[int] = []
        self._failure: RequestFailed | None = None
        self._waiter: asyncio.Future[None] | None = None

    def add(self, choice: int) -> None:
        """One more token of ``choice`` is there."""
        self._ready.append(choice)
        self._wake()

    def fail(self, failure: RequestFailed) -> None:
        self._failure = failure
        self._wake()

    async def take(self) -> list[int]:
        """Wait for tokens; the choice of each, in order. Raises what `fail` was given."""
        while not self._ready and self._failure is None:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if self._failure is not None:
            raise self._failure
        ready, self._ready = self._ready, []
        return ready

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


@dataclass(frozen=True, slots=True)
class Observer:
    """Told the latencies of a rank's requests: seconds to the first token, seconds to every next one."""

    first_token: Callable[[float], None]
    next_token: Callable[[float], None]


@dataclass(slots=True)
class _Client:
    progress: Progress
    choice: int
    every_token: bool
    pull: Callable[[Sequence], Awaitable[None]] | None
    last_token_s: float  # submission time before the first token
    pulling: asyncio.Task[None] | None = None


class EngineDriver:
    """One engine with its clients; `run` is the loop, everything else is called from the same event loop."""

    def __init__(
        self,
        engine: Engine,
        publish: Callable[[list[KvEvent]], None],
        observer: Observer,
        # Not the event loop's time: uvloop's has a resolution of 1 ms.
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.engine = engine
        self._clock = clock
        self._publish = publish
        self._observer = observer
        self._clients: dict[str, _Client] = {}
        self._wake = asyncio.Event()
        self._pulls: set[asyncio.Task[None]] = set()
        self._readers: dict[str, asyncio.Future[None]] = {}  # of leases, whose end somebody awaits

    @property
    def requests(self) -> int:
        return len(self._clients)

    def submit(
        self,
        submission: Submission,
        progress: Progress,
        choice: int,
        *,
        every_token: bool,
        pull: Callable[[Sequence], Awaitable[None]] | None = None,
    ) -> Sequence:
        """Queue a sequence; ``progress`` hears of every token or only of the last.

        ``pull`` fetches the KV cache of a submission that has one elsewhere and raises `RequestFailed`.
        """
        sequence = self.engine.submit(submission)
        client = _Client(progress, choice, every_token, pull, self._clock())
        self._clients[submission.request_id] = client
        self._wake.set()
        return sequence

    def abort(self, request_id: str) -> None:
        """The client went away. No effect on a finished request."""
        client = self._clients.pop(request_id, None)
        if client is not None and client.pulling is not None:
            client.pulling.cancel()
        if self.engine.abort(request_id):
            self._wake.set()

    def release_lease(self, request_id: str) -> bool:
        released = self.engine.release_lease(request_id)
        reader = self._readers.get(request_id)
        if released and reader is not None and not reader.done():
            reader.set_result(None)
        self._wake.set()
        return released

    async def lease_read(self, request_id: str) -> None:
        """Return when a decode instance has read the leased blocks. Raises TimeoutError when the lease expires."""
        reader = self._readers[request_id] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(self.engine.limits.lease_s):
                await reader
        finally:
            del self._readers[request_id]

    def reset_prefix_cache(self) -> bool:
        return self.engine.cache.reset()

    def cache_changed(self) -> None:
        """Something else than a step changed the cache: tell it now, or with the step under way."""
        if not self.engine.stepping:
            self._publish(self.engine.cache.drain_events())
        self._wake.set()

    async def run(self) -> None:
        """Step the engine until cancelled."""
        try:
            end_s = self._clock()
            while True:
                self._wake.clear()
                duration_s = self.engine.schedule(end_s)
                self._start_pulls()
                if duration_s is None:
                    await self._idle()
                    end_s = self._clock()
                    continue
                end_s = max(end_s + duration_s, self._clock() - FORGIVEN_LAG_S)
                await asyncio.sleep(max(end_s - self._clock(), 0.0))
                self._finish_step(end_s)
        finally:
            for task in self._pulls:
                task.cancel()

    async def _idle(self) -> None:
        expiry_s = self.engine.next_expiry_s
        timeout_s = None if expiry_s == inf else max(expiry_s - self._clock(), 0.0)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._wake.wait(), timeout_s)

    def _finish_step(self, end_s: float) -> None:
        output = self.engine.finish_step(end_s)
        now_s = self._clock()
        self._publish(output.events)
        for sequence in output.produced:
            client = self._clients[sequence.request_id]
            waited_s, client.last_token_s = now_s - client.last_token_s, now_s
            if sequence.produced == 1:
                self._observer.first_token(waited_s)
            else:
                self._observer.next_token(waited_s)
            if sequence.finished:
                del self._clients[sequence.request_id]
                client.progress.add(client.choice)
            elif client.every_token:
                client.progress.add(client.choice)

    def _start_pulls(self) -> None:
        for sequence in self.engine.take_pulls():
            task = asyncio.create_task(self._pull(sequence))
            self._clients[sequence.request_id].pulling = task
            self._pulls.add(task)
            task.add_done_callback(self._pulls.discard)

    async def _pull(self, sequence: Sequence) -> None:
        client = self._clients[sequence.request_id]
        assert client.pull is not None, "a submission with remote KV needs a way to pull it"
        try:
            await client.pull(sequence)
        except RequestFailed as failure:
            client.pulling = None
            self.abort(sequence.request_id)
            client.progress.fail(failure)
        else:
            client.pulling = None
            self.engine.pull_finished(sequence.request_id)
            self._wake.set()
