"""KV event streams over ZeroMQ: one receiver thread for all engines.

A live stream is a SUB socket with frames ``[topic, sequence (8 bytes, big-endian), payload]``; engines
without topics leave the first one out. A replay is asked for on a DEALER socket with
``[b"", first sequence]`` and answered by ``[b"", topic, sequence, payload]`` per batch, then by one with
sequence -1. Answers are awaited in the poll loop, so an engine that does not answer delays nobody else.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import structlog
import zmq
from zmq.utils.monitor import recv_monitor_message

from cache_index.ingest import StreamIngest
from cache_index.radix import CacheIndex
from cache_index.readiness import Readiness
from cache_index.replay import Sequencer, StreamState
from cache_index.residency import Holder, UnknownHolderError

log = structlog.get_logger(__name__)

END_OF_REPLAY = b"\xff" * 8
MESSAGES_PER_TURN = 128  # per socket, before the others get theirs
RECEIVE_HIGH_WATER_MARK = 100_000
MAX_SOCKETS = 65_535  # three per stream at most; the library's own limit is 1,023
HEARTBEAT_MS = 5_000
IDLE_MS = 1_000


@dataclass(frozen=True, slots=True)
class StreamConfig:
    """Where one rank of an engine publishes its KV events.

    ``block_size`` None takes it from the events; ``replay_endpoint`` None: the engine cannot replay.
    """

    holder: Holder
    model: str
    endpoint: str
    replay_endpoint: str | None
    topic: str = ""
    block_size: int | None = None
    tenant: str = "default"


@dataclass(frozen=True, slots=True)
class StreamStats:
    """Counts since the stream was added. ``cold``: usable, but residencies may be missing."""

    holder: Holder
    state: StreamState
    last_seq: int
    batches: int
    events: int
    gaps: int
    replays: int
    malformed_frames: int
    malformed_events: int
    unknown_events: int
    unresolved_blocks: int
    last_event_at_s: float | None  # on the source's clock


class _Stream:
    """Sockets and state of one stream. Only the receiver thread touches the sockets.

    Batches that the sequencer lets through are kept until the turn ends and then applied at once.
    """

    def __init__(self, config: StreamConfig, index: CacheIndex, readiness: Readiness[_Stream | None]) -> None:
        self.config = config
        self._readiness = readiness
        self.ingest = StreamIngest(
            index, config.holder, config.model, tenant=config.tenant, block_size=config.block_size
        )
        self._payloads: list[bytes] = []
        self.sequencer = Sequencer(self._payloads.append, self._clear, self._request_replay)
        self.subscriber: zmq.Socket[bytes] | None = None
        self.monitor: zmq.Socket[bytes] | None = None
        self.dealer: zmq.Socket[bytes] | None = None
        self.removed = False
        self.malformed_frames = 0
        self.last_event_at_s: float | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None

    def open(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self._context = context
        self.subscriber = context.socket(zmq.SUB)
        self.subscriber.setsockopt(zmq.LINGER, 0)
        self.subscriber.setsockopt(zmq.RCVHWM, RECEIVE_HIGH_WATER_MARK)
        self.subscriber.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        self.subscriber.setsockopt(zmq.HEARTBEAT_TIMEOUT, 3 * HEARTBEAT_MS)
        self.subscriber.setsockopt(zmq.SUBSCRIBE, self.config.topic.encode())
        # The monitor tells of a new connection even when no event follows; what was published while
        # there was none is then asked for.
        self.monitor = self.subscriber.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        )
        self.subscriber.connect(self.config.endpoint)
        self._readiness.watch(self.monitor, self)
        self._readiness.watch(self.subscriber, self)

    def close(self) -> None:
        self.close_dealer()
        if self.subscriber is not None:
            if self.monitor is not None:
                self._readiness.forget(self.monitor)
                self.subscriber.disable_monitor()
                self.monitor.close(0)
            self._readiness.forget(self.subscriber)
            self.subscriber.close(0)
        self.subscriber = self.monitor = None
        self._readiness.drop(self)

    def close_dealer(self) -> None:
        if self.dealer is not None:
            self._readiness.forget(self.dealer)
            self.dealer.close(0)
            self.dealer = None

    def serve(self, now_s: float) -> None:
        """Take what the sockets have, up to a limit.

        Live messages are received before connections are looked at and applied after, so that a message
        of a new connection is never taken for one of the old. On a new connection those at hand are
        dropped: nobody knows which side of it they are from, and the replay brings what counts.
        """
        if self.subscriber is None:
            return
        live = self._received(self.subscriber)
        reconnected = self.sequencer.was_connected
        if not (self._serve_monitor(now_s) and reconnected):
            for frames in live:
                self._live(frames, now_s)
        if self.dealer is not None:
            self._serve_replay(self.dealer, now_s)
        self.tick(now_s)
        self._apply()

    def abandon(self) -> None:
        """Something unexpected happened: nothing is certain any more."""
        self._payloads.clear()
        self.sequencer.doubt()

    def tick(self, now_s: float) -> None:
        """Do what is due; drop the socket of a replay that is over."""
        self.sequencer.tick(now_s)
        if not self.sequencer.replaying:
            self.close_dealer()

    def _received(self, source: zmq.Socket[bytes]) -> list[list[bytes]]:
        messages: list[list[bytes]] = []
        with suppress(zmq.Again):
            while len(messages) < MESSAGES_PER_TURN:
                messages.append(source.recv_multipart(zmq.NOBLOCK))
            self._readiness.again(self)
        return messages

    def _serve_monitor(self, now_s: float) -> bool:
        """Whether a connection came up."""
        connected = False
        while self.monitor is not None and int(self.monitor.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            if recv_monitor_message(self.monitor, zmq.NOBLOCK)["event"] == zmq.EVENT_DISCONNECTED:
                self.sequencer.disconnected()
            else:
                self.sequencer.connected(now_s)
                connected = True
        return connected

    def _serve_replay(self, dealer: zmq.Socket[bytes], now_s: float) -> None:
        for frames in self._received(dealer):
            if dealer is not self.dealer:  # another replay was asked for meanwhile
                return
            if len(frames) < 2 or len(frames[-2]) != 8:
                self._malformed("replay frames", f"expected 8 bytes and a payload, got {len(frames)} frames")
            elif frames[-2] == END_OF_REPLAY:
                self.sequencer.replay_ended(now_s)
            else:
                self.sequencer.replayed(int.from_bytes(frames[-2], "big"), frames[-1], now_s)

    def _live(self, frames: list[bytes], now_s: float) -> None:
        self.last_event_at_s = now_s
        if len(frames) < 2 or len(frames[-2]) != 8:
            self._malformed("frames", f"expected topic, 8 bytes and a payload, got {len(frames)} frames")
            return
        self.sequencer.live(int.from_bytes(frames[-2], "big"), frames[-1], now_s)

    def _apply(self) -> None:
        payloads = self._payloads[:]
        self._payloads.clear()
        try:
            for error in self.ingest.apply_payloads(payloads):
                self._malformed(error.field, error.reason)
        except UnknownHolderError:
            log.debug("kv_stream.holder_unregistered", holder=self.config.holder)

    def _clear(self) -> None:
        self._apply()
        self.ingest.clear()

    def _malformed(self, field: str, reason: str) -> None:
        self.malformed_frames += 1
        if self.malformed_frames == 1:
            log.warning(
                "kv_stream.malformed_frame", holder=self.config.holder, field=field, reason=reason[:200]
            )

    def _request_replay(self, first: int) -> bool:
        self.close_dealer()
        if self.config.replay_endpoint is None or self._context is None:
            return False
        dealer = self._context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.LINGER, 0)
        try:
            dealer.connect(self.config.replay_endpoint)
            dealer.send_multipart([b"", struct.pack(">Q", first)], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            log.warning("kv_stream.replay_failed", holder=self.config.holder, reason=str(error))
            dealer.close(0)
            return False
        self.dealer = dealer
        self._readiness.watch(dealer, self)
        return True

    def stats(self) -> StreamStats:
        counters, sequencer = self.ingest.counters, self.sequencer
        return StreamStats(
            holder=self.config.holder,
            state=sequencer.state,
            last_seq=sequencer.last_sequence,
            batches=sequencer.batches,
            events=counters.events,
            gaps=sequencer.gaps,
            replays=sequencer.replays,
            malformed_frames=self.malformed_frames,
            malformed_events=counters.malformed_events,
            unknown_events=counters.unknown_events,
            unresolved_blocks=counters.unresolved_blocks,
            last_event_at_s=self.last_event_at_s,
        )


class VllmEventSource:
    """Keeps an index in step with the KV events of vLLM-compatible engines."""

    def __init__(self, index: CacheIndex, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._index = index
        self._clock = clock
        self._lock = threading.RLock()  # held while a batch is applied, so that a removal is final
        self._streams: dict[Holder, _Stream] = {}
        self._commands: deque[Callable[[], None]] = deque()
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._wake_receiver.setblocking(False)
        self._wake_sender.setblocking(False)
        self._thread: threading.Thread | None = None
        self._closed = False
        self._readiness: Readiness[_Stream | None] = Readiness()  # None owns the wake-up
        self._readiness.watch_descriptor(self._wake_receiver.fileno(), None)
        self._open_streams: set[_Stream] = set()
        self._due: set[_Stream] = set()

    def start(self) -> None:
        """Start the receiver thread."""
        if self._thread is None and not self._closed:
            self._thread = threading.Thread(target=self._receive, name="kv-events", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Stop the receiver thread and close all sockets. What the index holds stays."""
        if self._closed:
            return
        self._closed = True
        self._wake()
        if self._thread is not None:
            self._thread.join()
        self._wake_receiver.close()
        self._wake_sender.close()
        self._readiness.close()

    def add_stream(self, config: StreamConfig) -> None:
        """Follow a stream; its holder is registered. A stream of the same holder is replaced."""
        self.remove_stream(config.holder)
        self._index.register(config.holder)
        stream = _Stream(config, self._index, self._readiness)
        with self._lock:
            self._streams[config.holder] = stream
        self._order(lambda: self._open(stream))

    def remove_stream(self, holder: Holder) -> None:
        """Stop following a stream and drop what it reported: without events it would become wrong."""
        with self._lock:
            stream = self._streams.pop(holder, None)
            if stream is None:
                return
            stream.removed = True
            self._index.clear(holder)
        self._order(lambda: self._close(stream))

    def resync(self, holder: Holder) -> None:
        """The engine came back or lost its cache: forget what it reported and ask for everything."""
        with self._lock:
            stream = self._streams.get(holder)
            if stream is None:
                return
            stream.ingest.clear()
        self._order(lambda: self._resync(stream))

    def stream_stats(self) -> list[StreamStats]:
        with self._lock:
            return [stream.stats() for stream in self._streams.values()]

    def _order(self, command: Callable[[], None]) -> None:
        self._commands.append(command)
        self._wake()

    def _wake(self) -> None:
        with suppress(BlockingIOError):  # enough wake-ups are on their way
            self._wake_sender.send(b"\0")

    def _receive(self) -> None:
        self._context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
        timeout_ms = IDLE_MS
        try:
            while not self._closed:
                ready = self._readiness.wait(timeout_ms)
                if None in ready:
                    self._run_commands()
                served = self._serve({stream for stream in ready if stream is not None})
                reclaiming = not served and self._index.reclaim()
                timeout_ms = 0 if reclaiming else self._timeout_ms()
        finally:
            for stream in self._open_streams:
                stream.close()
            self._context.destroy(0)

    def _run_commands(self) -> None:
        while True:
            try:
                if len(self._wake_receiver.recv(4096)) < 4096:
                    break
            except BlockingIOError:
                break
        while self._commands:
            with self._lock:
                self._commands.popleft()()

    def _serve(self, ready: set[_Stream]) -> bool:
        """Serve the streams with something to read, and those with something due."""
        now_s = self._clock()
        for stream in ready | self._due:
            with self._lock:
                if stream.removed:
                    continue
                try:
                    stream.serve(now_s)
                except Exception:
                    # A fault of ours must not stop the other streams; what this one has is in doubt.
                    log.exception("kv_stream.failed", holder=stream.config.holder)
                    stream.abandon()
                self._mind(stream)
        return bool(ready)

    def _timeout_ms(self) -> int:
        deadlines = [each for stream in self._due if (each := stream.sequencer.deadline_s) is not None]
        if not deadlines:
            return IDLE_MS
        return min(IDLE_MS, max(1, int(1000 * (min(deadlines) - self._clock())) + 1))

    def _mind(self, stream: _Stream) -> None:
        """Remember whether something is due for the stream."""
        if stream.sequencer.deadline_s is None:
            self._due.discard(stream)
        else:
            self._due.add(stream)

    def _open(self, stream: _Stream) -> None:
        if stream.removed:
            return
        try:
            stream.open(self._context)
        except zmq.ZMQError as error:
            log.error("kv_stream.not_opened", endpoint=stream.config.endpoint, reason=str(error))
            stream.close()
            return
        self._open_streams.add(stream)

    def _close(self, stream: _Stream) -> None:
        stream.close()
        self._open_streams.discard(stream)
        self._due.discard(stream)

    def _resync(self, stream: _Stream) -> None:
        if not stream.removed:
            stream.sequencer.resync(self._clock())
            self._mind(stream)
