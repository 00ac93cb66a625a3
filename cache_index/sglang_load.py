"""SGLang's load feed: what every data-parallel rank has to do, pushed when it changes.

A message on topic ``load`` is a msgpack array ``["LoadStat", running, waiting, KV tokens in use, KV token
capacity, rank, waiting uncached tokens, total tokens, most running, uncached tokens prefilled so far,
microseconds of prefill so far]``, as recorded from SGLang 0.5.23 with ``--load-publish-endpoint auto``.
Later versions may append fields.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import structlog

from cache_index.events import MalformedEventError
from cache_index.residency import Holder
from cache_index.subscriber import Feed, Subscriber

log = structlog.get_logger(__name__)

_FIELDS = (
    "running",
    "waiting",
    "kv_tokens_used",
    "kv_token_capacity",
    "rank",
    "waiting_uncached_tokens",
    "total_tokens",
    "max_running",
    "prefilled_uncached_tokens",
    "prefill_busy_us",
)
_decoder = msgspec.msgpack.Decoder()


@dataclass(frozen=True, slots=True)
class LoadStat:
    """The load of one rank. The last two fields only grow, until the engine restarts."""

    running: int
    waiting: int
    kv_tokens_used: int
    kv_token_capacity: int
    rank: int
    waiting_uncached_tokens: int  # what the queue still has to prefill
    total_tokens: int
    max_running: int
    prefilled_uncached_tokens: int
    prefill_busy_us: int

    @property
    def kv_usage(self) -> float:
        """Share of the KV cache in use, 0 to 1."""
        return self.kv_tokens_used / self.kv_token_capacity if self.kv_token_capacity else 0.0

    def prefill_tokens_per_s(self, earlier: LoadStat) -> float | None:
        """Prefill speed between two reports; None when nothing was prefilled or the engine restarted."""
        tokens = self.prefilled_uncached_tokens - earlier.prefilled_uncached_tokens
        busy_us = self.prefill_busy_us - earlier.prefill_busy_us
        return tokens * 1e6 / busy_us if tokens > 0 and busy_us > 0 else None


def decode_load(payload: bytes) -> LoadStat:
    """Raises MalformedEventError naming the field at fault."""
    try:
        values = _decoder.decode(payload)
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        raise MalformedEventError("payload", str(error)) from error
    if not isinstance(values, list) or not values or values[0] != "LoadStat":
        raise MalformedEventError("payload", "expected an array that begins with LoadStat")
    if len(values) <= len(_FIELDS):
        raise MalformedEventError(_FIELDS[len(values) - 1], "is missing")
    for name, value in zip(_FIELDS, values[1:], strict=False):
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise MalformedEventError(name, f"expected a count, got {value!r:.40}")
    return LoadStat(*values[1 : len(_FIELDS) + 1])


class SglangLoadFeeds:
    """Receives the load feeds of many ranks on one thread and hands on what they say.

    ``deliver(holder, stat)`` is called on that thread and must not block; the rank in ``holder`` is the
    one that the report names.
    """

    def __init__(self, deliver: Callable[[Holder, LoadStat], None]) -> None:
        self._deliver = deliver
        self._subscriber = Subscriber("sglang-load")
        self.malformed = 0

    def start(self) -> None:
        self._subscriber.start()

    def close(self) -> None:
        self._subscriber.close()

    def follow(self, holder: Holder, endpoint: str, topic: str = "load") -> None:
        """Receive one rank's feed; a feed of the same holder is replaced."""

        def received(_sequence: int, payload: bytes) -> None:
            try:
                stat = decode_load(payload)
            except MalformedEventError as error:
                self._malformed(holder, str(error))
                return
            self._deliver(Holder(holder.instance_id, stat.rank), stat)

        feed = Feed(endpoint, topic, received, lambda reason: self._malformed(holder, reason))
        self._subscriber.follow(holder, feed)

    def unfollow(self, holder: Holder) -> None:
        self._subscriber.unfollow(holder)

    def _malformed(self, holder: Holder, reason: str) -> None:
        self.malformed += 1
        if self.malformed == 1:
            log.warning("sglang_load.malformed", holder=holder, reason=reason[:200])
