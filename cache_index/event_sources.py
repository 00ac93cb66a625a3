"""Several event sources as one: the scheme of a stream's endpoint says which of them follows it."""

from __future__ import annotations

from collections.abc import Mapping

from cache_index.event_source import EventSource
from cache_index.residency import Holder
from cache_index.streams import StreamConfig, StreamStats


class EventSources:
    """An EventSource made of others, by endpoint scheme: ``{"tcp": ..., "http": ...}``."""

    def __init__(self, by_scheme: Mapping[str, EventSource]) -> None:
        self._by_scheme = dict(by_scheme)
        self._sources: list[EventSource] = []
        for source in self._by_scheme.values():
            if source not in self._sources:
                self._sources.append(source)

    def start(self) -> None:
        for source in self._sources:
            source.start()

    def close(self) -> None:
        for source in self._sources:
            source.close()

    def add_stream(self, config: StreamConfig) -> None:
        """ValueError when no source knows the endpoint's scheme."""
        scheme = config.endpoint.partition("://")[0]
        wanted = self._by_scheme.get(scheme)
        if wanted is None:
            known = ", ".join(sorted(self._by_scheme))
            raise ValueError(f"endpoint {config.endpoint!r} must be one of {known}")
        for source in self._sources:
            if source is not wanted:
                source.remove_stream(config.holder)
        wanted.add_stream(config)

    def remove_stream(self, holder: Holder) -> None:
        for source in self._sources:
            source.remove_stream(holder)

    def resync(self, holder: Holder) -> None:
        for source in self._sources:
            source.resync(holder)

    def stream_stats(self) -> list[StreamStats]:
        return [stats for source in self._sources for stats in source.stream_stats()]
