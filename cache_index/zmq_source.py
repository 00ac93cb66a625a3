"""KV event streams over ZeroMQ: one receiver thread for all engines.

A live stream is a subscription. A replay is asked for on a DEALER socket with ``[b"", first sequence]`` and
answered by ``[b"", topic, sequence, payload]`` per batch, then by one with sequence -1. Answers are awaited
in the poll loop, so an engine that does not answer delays nobody else.

Where every stream stands can be kept with the index, so that a later process continues them.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import structlog
import zmq

from cache_index.event_batch import published_at
from cache_index.ingest import StreamIngest
from cache_index.radix import CacheIndex
from cache_index.readiness import Readiness
from cache_index.receiver import IDLE_MS, Receiver
from cache_index.replay import Sequencer
from cache_index.residency import Holder, UnknownHolderError
from cache_index.streams import StreamConfig, StreamPosition, StreamStats
from cache_index.subscription import Subscription, numbered, received

log = structlog.get_logger(__name__)

END_OF_REPLAY = b"\xff" * 8
MESSAGES_PER_TURN = 128  # per socket, before the others get theirs
RESUME_WITHIN_S = 30.0  # what an earlier process knew of an engine is believed that long without the engine


class _Stream:
    """Sockets and state of one stream. Only the receiver thread touches the sockets.

    Batches that the sequencer lets through are kept until the turn ends and then applied at once.
    """

    def __init__(
        self,
        config: StreamConfig,
        index: CacheIndex,
        readiness: Readiness[_Stream | None],
        wall_clock: Callable[[], float],
    ) -> None:
        self.config = config
        self._readiness = readiness
        self._wall_clock = wall_clock
        self.ingest = StreamIngest(
            index,
            config.holder,
            config.model,
            tenant=config.tenant,
            block_size=config.block_size,
            tiers=config.tiers,
        )
        self._payloads: list[bytes] = []
        self.sequencer = Sequencer(self._payloads.append, self._clear, self._request_replay)
        self.subscription: Subscription | None = None
        self.dealer: zmq.Socket[bytes] | None = None
        self.removed = False
        self.malformed_frames = 0
        self.last_event_at_s: float | None = None
        self.lag_s: float | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None

    def open(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        """ZMQError or OSError when that is not possible."""
        self.subscription = Subscription(
            context, self.config.endpoint, self.config.topic, self._readiness, self
        )
        self._context = context

    def close(self) -> None:
        self.close_dealer()
        if self.subscription is not None:
            self.subscription.close()
            self.subscription = None
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
        if self.subscription is None:
            return
        live = self._told_of(self.subscription.messages(MESSAGES_PER_TURN))
        reconnected = self.sequencer.was_connected
        if not (self._serve_connections(self.subscription, now_s) and reconnected):
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

    def _told_of(self, messages: list[list[bytes]]) -> list[list[bytes]]:
        """Come back if there may be more: nobody tells of what was there already."""
        if len(messages) == MESSAGES_PER_TURN:
            self._readiness.again(self)
        return messages

    def _serve_connections(self, subscription: Subscription, now_s: float) -> bool:
        """Whether a connection came up."""
        came_up = False
        for connected in subscription.connections():
            if connected:
                self.sequencer.connected(now_s)
                came_up = True
            else:
                self.sequencer.disconnected()
        return came_up

    def _serve_replay(self, dealer: zmq.Socket[bytes], now_s: float) -> None:
        for frames in self._told_of(received(dealer, MESSAGES_PER_TURN)):
            if dealer is not self.dealer:  # another replay was asked for meanwhile
                return
            message = numbered(frames)
            if message is None:
                self._malformed("replay frames", f"expected 8 bytes and a payload, got {len(frames)} frames")
            elif frames[-2] == END_OF_REPLAY:
                self.sequencer.replay_ended(now_s)
            else:
                self.sequencer.replayed(*message, now_s)

    def _live(self, frames: list[bytes], now_s: float) -> None:
        self.last_event_at_s = now_s
        message = numbered(frames)
        if message is None:
            self._malformed("frames", f"expected topic, 8 bytes and a payload, got {len(frames)} frames")
        else:
            self.sequencer.live(*message, now_s)

    def _apply(self) -> None:
        payloads = self._payloads[:]
        self._payloads.clear()
        clears = self.ingest.clears
        try:
            for error in self.ingest.apply_payloads(payloads):
                self._malformed(error.field, error.reason)
        except UnknownHolderError:
            log.debug("kv_stream.holder_unregistered", holder=self.config.holder)
            self.sequencer.doubt()  # what was dropped here would be missing if the holder came back
        else:
            published_s = published_at(payloads[-1]) if payloads else None
            if published_s is not None:
                self.lag_s = self._wall_clock() - published_s
            if self.ingest.clears != clears:
                self.sequencer.emptied()

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
        dealer: zmq.Socket[bytes] | None = None
        try:
            dealer = self._context.socket(zmq.DEALER)
            dealer.setsockopt(zmq.LINGER, 0)
            dealer.setsockopt(zmq.RCVHWM, 0)  # what waits here does not wait where it might be dropped
            dealer.connect(self.config.replay_endpoint)
            dealer.send_multipart([b"", struct.pack(">Q", first)], zmq.NOBLOCK)
            self._readiness.watch(dealer, self)
        except (zmq.ZMQError, OSError) as error:
            log.warning("kv_stream.replay_failed", holder=self.config.holder, reason=str(error))
            if dealer is not None:
                dealer.close(0)
            return False
        self.dealer = dealer
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
            other_group_events=counters.other_group_events,
            lag_s=self.lag_s,
        )


class VllmEventSource:
    """Keeps an index in step with the KV events of vLLM-compatible engines."""

    def __init__(
        self,
        index: CacheIndex,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """``wall_clock`` is that of the times in engines' batches: seconds since 1970."""
        self._index = index
        self._clock = clock
        self._wall_clock = wall_clock
        self._receiver: Receiver[_Stream] = Receiver("kv-events", self._serve, self._end)
        self._lock = self._receiver.lock  # held while a batch is applied, so that a removal is final
        self._streams: list[_Stream] = []
        self._parked: list[StreamPosition] = []  # of streams that were not added again so far
        self._parked_until_s = 0.0
        self._open_streams: set[_Stream] = set()
        self._due: set[_Stream] = set()

    def start(self) -> None:
        """Start the receiver thread."""
        self._receiver.start()

    def close(self) -> None:
        """Stop the receiver thread and close all sockets. What the index holds stays."""
        self._receiver.close()

    def add_stream(self, config: StreamConfig) -> None:
        """Follow a stream; its holder is registered. A stream of the same holder and tier is replaced.

        It continues at the position that ``resume`` was given for it, else it begins with all that the
        engine has.
        """
        with self._lock:
            self._remove([each for each in self._streams if each.config.overlaps(config)])
            parked = [each for each in self._parked if each.config.overlaps(config)]
            self._index.register(config.holder)
            stream = _Stream(config, self._index, self._receiver.readiness, self._wall_clock)
            for each in parked:
                self._parked.remove(each)
                if each.config.means_the_same(config):
                    stream.sequencer.resume(each.position, self._clock() + RESUME_WITHIN_S)
                    stream.ingest.resume(each.traits)
                else:
                    self._clear(each.config)
            self._streams.append(stream)
            self._receiver.order(lambda: self._open(stream))

    def remove_stream(self, holder: Holder) -> None:
        """Stop following a holder and drop what its streams reported: without events it would become wrong."""
        with self._lock:
            self._remove([each for each in self._streams if each.config.holder == holder])
            self._drop([each for each in self._parked if each.config.holder == holder])

    def resync(self, holder: Holder) -> None:
        """The engine came back or lost its cache: forget what it reported and ask for everything."""
        with self._lock:
            self._drop([each for each in self._parked if each.config.holder == holder])
            for stream in self._streams:
                if stream.config.holder == holder:
                    stream.sequencer.doubt()
                    self._receiver.order(lambda stream=stream: self._resync(stream))  # type: ignore[misc]

    def stream_stats(self) -> list[StreamStats]:
        with self._lock:
            return [stream.stats() for stream in self._streams]

    @contextmanager
    def paused(self) -> Iterator[list[StreamPosition]]:
        """Nothing is applied meanwhile. Gives the positions that the index has, of streams that can resume."""
        with self._lock:
            positions = [*self._parked]
            for stream in self._streams:
                position = stream.sequencer.position
                if position is not None and stream.config.replay_endpoint is not None:
                    positions.append(StreamPosition(stream.config, position, stream.ingest.traits))
            yield positions

    def resume(self, positions: Iterable[StreamPosition]) -> None:
        """The index has been loaded, and has what streams reported up to these positions.

        A stream that is added like one of them, and connects, within RESUME_WITHIN_S, goes on from there
        if its engine is still the same. Otherwise what it reported is dropped.
        """
        with self._lock:
            self._parked += positions
            self._parked_until_s = self._clock() + RESUME_WITHIN_S

    def _serve(self, ready: set[_Stream]) -> int:
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
        if self._parked and now_s >= self._parked_until_s:
            with self._lock:
                self._drop([*self._parked])
        if not ready and self._index.reclaim():
            return 0
        return self._timeout_ms()

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
            stream.open(self._receiver.context)
        except (zmq.ZMQError, OSError) as error:
            log.error("kv_stream.not_opened", endpoint=stream.config.endpoint, reason=str(error))
            stream.abandon()
            return
        self._open_streams.add(stream)
        self._mind(stream)

    def _remove(self, streams: list[_Stream]) -> None:
        for stream in streams:
            self._streams.remove(stream)
            stream.removed = True
            stream.ingest.clear()
            self._receiver.order(lambda stream=stream: self._close(stream))  # type: ignore[misc]

    def _drop(self, parked: list[StreamPosition]) -> None:
        for each in parked:
            self._parked.remove(each)
            self._clear(each.config)
            log.info("kv_stream.not_resumed", holder=each.config.holder)

    def _clear(self, config: StreamConfig) -> None:
        for tier in (None,) if config.tiers is None else config.tiers:
            self._index.clear(config.holder, tier)

    def _close(self, stream: _Stream) -> None:
        stream.close()
        self._open_streams.discard(stream)
        self._due.discard(stream)

    def _resync(self, stream: _Stream) -> None:
        if not stream.removed and stream.subscription is not None:
            stream.sequencer.resync(self._clock())
            self._mind(stream)

    def _end(self) -> None:
        for stream in self._open_streams:
            stream.close()
