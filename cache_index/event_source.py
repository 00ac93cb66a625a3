"""What any source of KV events offers: streams followed into an index, each watched over."""

from __future__ import annotations

from typing import Protocol

from cache_index.residency import Holder
from cache_index.streams import StreamConfig, StreamStats


class StreamBooks(Protocol):
    """Whatever can tell how its streams are doing."""

    def stream_stats(self) -> list[StreamStats]: ...


class EventSource(Protocol):
    """Keeps an index in step with engines. Methods may be called from any thread and do not wait for engines."""

    def start(self) -> None:
        """Begin to follow streams, those added before included."""

    def close(self) -> None:
        """Stop; what the index holds stays."""

    def add_stream(self, config: StreamConfig) -> None:
        """Follow one rank's stream from its beginning, as far back as the engine can replay."""

    def remove_stream(self, holder: Holder) -> None:
        """Stop following it and forget what it reported."""

    def resync(self, holder: Holder) -> None:
        """The engine went away or came back: forget what it reported and read its stream from the beginning."""

    def stream_stats(self) -> list[StreamStats]: ...
