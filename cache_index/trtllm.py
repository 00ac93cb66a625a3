"""Polling the KV cache events of TensorRT-LLM servers.

The server keeps events until somebody asks, and gives each of them once: exactly one poller may exist per
server. One answer has the events of all attention data-parallel ranks.
"""

from __future__ import annotations

import asyncio
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import httpx
import structlog

from cache_index.events import MalformedEventError
from cache_index.radix import CacheIndex
from cache_index.replay import StreamState
from cache_index.residency import Holder, UnknownHolderError
from cache_index.streams import StreamConfig, StreamStats
from cache_index.trtllm_events import TrtEvent, decode_event
from cache_index.trtllm_ingest import TrtllmIngest

log = structlog.get_logger(__name__)

PATH = "/kv_cache_events"
DEFAULT_BLOCK_SIZE = 32  # the server's own default
POLL_INTERVAL_S = 0.05
RETRY_INTERVAL_S = 1.0
TIMEOUT_S = 10.0  # the server itself waits for events, up to seconds


class _Rank:
    """One followed stream: the events of a rank."""

    def __init__(self, config: StreamConfig, index: CacheIndex) -> None:
        self.config = config
        self.ingest = TrtllmIngest(
            index,
            config.holder,
            config.model,
            config.block_size or DEFAULT_BLOCK_SIZE,
            tenant=config.tenant,
        )
        self.connected = False
        self.batches = 0
        self.malformed_answers = 0
        self.block_size_doubted = False
        self.last_event_at_s: float | None = None

    def apply(self, event: TrtEvent, now_s: float) -> None:
        self.last_event_at_s = now_s
        try:
            self.ingest.apply(event)
        except UnknownHolderError:
            log.debug("trtllm_stream.holder_unregistered", holder=self.config.holder)
        if self.ingest.larger_block is not None and not self.block_size_doubted:
            self.block_size_doubted = True
            log.warning(
                "trtllm_stream.wrong_block_size",
                holder=self.config.holder,
                remedy=f"a block of {self.ingest.larger_block} tokens came; set block_size to tokens_per_block",
            )

    @property
    def state(self) -> StreamState:
        if not self.connected:
            return "connecting"
        return "warm" if self.ingest.complete else "cold"

    def stats(self) -> StreamStats:
        counters = self.ingest.counters
        return StreamStats(
            holder=self.config.holder,
            state=self.state,
            last_seq=self.ingest.last_event_id,
            batches=self.batches,
            events=counters.events,
            gaps=self.ingest.gaps,
            replays=0,
            malformed_frames=self.malformed_answers,
            malformed_events=counters.malformed_events,
            unknown_events=counters.unknown_events,
            unresolved_blocks=counters.unresolved_blocks,
            last_event_at_s=self.last_event_at_s,
        )


@dataclass(slots=True)
class _Server:
    """One polled server with the ranks that are followed."""

    url: str
    ranks: dict[Holder, _Rank] = field(default_factory=dict)
    method: str = "POST"  # early versions serve GET


class TrtllmEventSource:
    """An EventSource whose streams' endpoints are URLs of TensorRT-LLM servers; ``tls`` is for https ones."""

    def __init__(
        self,
        index: CacheIndex,
        *,
        clock: Callable[[], float] = time.monotonic,
        interval_s: float = POLL_INTERVAL_S,
        timeout_s: float = TIMEOUT_S,
        retry_s: float = RETRY_INTERVAL_S,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._index = index
        self._clock = clock
        self._interval_s = interval_s
        self._timeout_s = timeout_s
        self._retry_s = retry_s
        self._tls = tls
        self._lock = threading.RLock()  # held while an answer is applied, so that a removal is final
        self._servers: dict[str, _Server] = {}
        self._ranks: dict[Holder, _Rank] = {}
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._changed: asyncio.Event | None = None
        self._closed = False

    def start(self) -> None:
        """Start the polling thread."""
        if self._thread is None and not self._closed:
            self._thread = threading.Thread(target=self._run, name="trtllm-events", daemon=True)
            self._thread.start()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._wake()
        if self._thread is not None:
            self._thread.join()

    def add_stream(self, config: StreamConfig) -> None:
        """Follow one rank of a server; its holder is registered. A stream of the same holder is replaced."""
        self.remove_stream(config.holder)
        self._index.register(config.holder)
        with self._lock:
            rank = self._ranks[config.holder] = _Rank(config, self._index)
            url = _events_url(config.endpoint)
            self._servers.setdefault(url, _Server(url)).ranks[config.holder] = rank
            self._wake()

    def remove_stream(self, holder: Holder) -> None:
        with self._lock:
            rank = self._ranks.pop(holder, None)
            if rank is None:
                return
            rank.ingest.clear()
            server = self._servers[_events_url(rank.config.endpoint)]
            server.ranks.pop(holder, None)
            if not server.ranks:
                del self._servers[server.url]
            self._wake()

    def resync(self, holder: Holder) -> None:
        """Put what the rank reported into the index once more, where somebody may have cleared it.

        The server repeats nothing, and whether it restarted is seen while polling: it was unreachable, or its
        events count from 0 again.
        """
        with self._lock:
            rank = self._ranks.get(holder)
            if rank is not None:
                rank.ingest.restore()

    def stream_stats(self) -> list[StreamStats]:
        with self._lock:
            return [rank.stats() for rank in self._ranks.values()]

    def _wake(self) -> None:
        if self._loop is not None and self._changed is not None:
            self._loop.call_soon_threadsafe(self._changed.set)

    def _run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        """One polling task a server, as servers come and go."""
        with self._lock:
            self._loop = asyncio.get_running_loop()
            self._changed = asyncio.Event()
        tasks: dict[str, asyncio.Task[None]] = {}
        verify = True if self._tls is None else self._tls
        async with httpx.AsyncClient(timeout=self._timeout_s, trust_env=False, verify=verify) as client:
            while not self._closed:
                with self._lock:
                    wanted = dict(self._servers)
                for url in [url for url in tasks if url not in wanted]:
                    tasks.pop(url).cancel()
                for url in wanted:
                    if url not in tasks:
                        tasks[url] = asyncio.create_task(self._poll_forever(client, url), name=f"poll {url}")
                await self._changed.wait()
                self._changed.clear()
            for task in tasks.values():
                task.cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)
        with self._lock:
            self._loop = None

    async def _poll_forever(self, client: httpx.AsyncClient, url: str) -> None:
        while True:
            try:
                await asyncio.sleep(self._interval_s if await self._poll(client, url) else self._retry_s)
            except Exception:  # a fault of ours must not end the stream; what was applied is in doubt
                log.exception("trtllm_stream.failed", url=url)
                self._doubt(url)
                await asyncio.sleep(self._retry_s)

    async def _poll(self, client: httpx.AsyncClient, url: str) -> bool:
        """Ask once. False when the server gave no usable answer."""
        with self._lock:
            server = self._servers.get(url)
        if server is None:
            return False
        try:
            response = await client.request(server.method, url)
        except httpx.ConnectError:
            self._unreachable(server)  # no process, no cache
            return False
        except httpx.HTTPError as error:
            log.debug("trtllm_stream.no_answer", url=url, reason=repr(error))
            return False
        if response.status_code == 405 and server.method == "POST":
            server.method = "GET"
            return True
        try:
            items = response.json() if response.status_code == 200 else None
        except ValueError:
            items = None
        with self._lock:
            if not isinstance(items, list):
                self._malformed(server, f"status {response.status_code}, no list of events")
                return False
            self._apply(server, items)
        return True

    def _apply(self, server: _Server, items: list[object]) -> None:
        now_s = self._clock()
        for rank in server.ranks.values():
            rank.connected = True
            rank.batches += bool(items)
        for item in items:
            try:
                event = decode_event(item)
            except MalformedEventError as error:
                self._malformed(server, str(error))
                continue
            for rank in server.ranks.values():
                if rank.config.holder.rank == event.rank:
                    rank.apply(event, now_s)

    def _unreachable(self, server: _Server) -> None:
        with self._lock:
            for rank in server.ranks.values():
                if rank.connected:
                    rank.connected = False
                    rank.ingest.clear()

    def _doubt(self, url: str) -> None:
        with self._lock:
            server = self._servers.get(url)
            for rank in server.ranks.values() if server else ():
                rank.ingest.clear()

    def _malformed(self, server: _Server, reason: str) -> None:
        for rank in server.ranks.values():
            rank.malformed_answers += 1
            if rank.malformed_answers == 1:
                log.warning("trtllm_stream.malformed", url=server.url, reason=reason[:200])


def _events_url(endpoint: str) -> str:
    return endpoint if endpoint.rstrip("/").endswith(PATH) else endpoint.rstrip("/") + PATH
