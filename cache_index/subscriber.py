"""Live ZeroMQ publications that need no replay: one receiver thread for all feeds."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass

import structlog
import zmq

from cache_index.receiver import IDLE_MS, Receiver
from cache_index.subscription import Subscription, numbered

log = structlog.get_logger(__name__)

MESSAGES_PER_TURN = 128  # per feed, before the others get theirs


def _ignore_connection(_connected: bool) -> None: ...


@dataclass(frozen=True, slots=True)
class Feed:
    """A publisher to follow. The handlers run on the receiver thread, one at a time, and must not block."""

    endpoint: str
    topic: str
    on_message: Callable[[int, bytes], None]  # sequence number, payload
    on_malformed: Callable[[str], None]  # frames that are no message; the reason
    on_connection: Callable[[bool], None] = _ignore_connection  # whether there is a connection now


class _Followed:
    """A feed and its subscription, which only the receiver thread touches."""

    def __init__(self, feed: Feed) -> None:
        self.feed = feed
        self.removed = False
        self.subscription: Subscription | None = None

    def serve(self) -> bool:
        """Whether there may be more to read.

        Connections first: a message of a new connection must find what the old one left cleared.
        """
        if self.subscription is None:
            return False
        feed = self.feed
        for connected in self.subscription.connections():
            self._tell(feed.on_connection, connected)
        messages = self.subscription.messages(MESSAGES_PER_TURN)
        for frames in messages:
            message = numbered(frames)
            if message is None:
                reason = f"expected topic, 8 bytes and a payload, got {len(frames)} frames"
                self._tell(feed.on_malformed, reason)
            else:
                self._tell(feed.on_message, *message)
        return len(messages) == MESSAGES_PER_TURN

    def _tell(self, handler: Callable[..., None], *news: object) -> None:
        """A fault in a handler must stop neither this feed nor the others."""
        if self.removed:
            return
        try:
            handler(*news)
        except Exception:
            log.exception("feed.failed", endpoint=self.feed.endpoint)


class Subscriber:
    """Follows feeds until they are dropped. Methods may be called from any thread."""

    def __init__(self, name: str) -> None:
        self._receiver: Receiver[_Followed] = Receiver(name, self._serve, self._end)
        self._lock = self._receiver.lock  # held while a handler runs, so that a removal is final
        self._followed: dict[Hashable, _Followed] = {}
        self._open_feeds: set[_Followed] = set()

    def start(self) -> None:
        """Begin to receive, from feeds added before too."""
        self._receiver.start()

    def close(self) -> None:
        self._receiver.close()

    def follow(self, key: Hashable, feed: Feed) -> None:
        """Receive a feed; one of the same key is replaced."""
        with self._lock:
            self.unfollow(key)
            followed = self._followed[key] = _Followed(feed)
            self._receiver.order(lambda: self._open(followed))

    def unfollow(self, key: Hashable) -> None:
        """No handler of the feed is called any more once this has returned."""
        with self._lock:
            followed = self._followed.pop(key, None)
            if followed is not None:
                followed.removed = True
                self._receiver.order(lambda: self._close(followed))

    def _serve(self, ready: set[_Followed]) -> int:
        for followed in ready:
            with self._lock:
                if not followed.removed and followed.serve():
                    self._receiver.readiness.again(followed)
        return IDLE_MS

    def _open(self, followed: _Followed) -> None:
        if followed.removed:
            return
        feed = followed.feed
        try:
            followed.subscription = Subscription(
                self._receiver.context, feed.endpoint, feed.topic, self._receiver.readiness, followed
            )
        except (zmq.ZMQError, OSError) as error:
            log.error("feed.not_opened", endpoint=feed.endpoint, reason=str(error))
        else:
            self._open_feeds.add(followed)

    def _close(self, followed: _Followed) -> None:
        if followed.subscription is not None:
            followed.subscription.close()
            followed.subscription = None
        self._receiver.readiness.drop(followed)
        self._open_feeds.discard(followed)

    def _end(self) -> None:
        for followed in [*self._open_feeds]:
            self._close(followed)
