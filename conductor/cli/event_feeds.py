"""Every way cache events reach one index: engines' streams, pushed events, LMCache servers."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from fastapi import APIRouter

from cache_index import (
    CacheIndex,
    EventSource,
    EventSources,
    Holder,
    MooncakeEventSource,
    StreamConfig,
    StreamPosition,
    StreamStats,
    TrtllmEventSource,
    VllmEventSource,
)
from cache_index.lmcache import make_lmcache_router
from cache_index.lmcache_directory import LMCacheDirectory
from cache_index.mooncake import MooncakeStream
from cache_index.prompt_match import PromptMatcher
from cache_index.push import make_push_router
from cache_index.push_ingest import PushIngest
from conductor.config import MasterConfig

_EXPIRY_CHECK_S = 5.0


class EventFeeds:
    """The sources over one index, started and closed together."""

    def __init__(
        self, index: CacheIndex, clock: Callable[[], float], tls: ssl.SSLContext | None = None
    ) -> None:
        engines, trtllm, mooncake = (
            VllmEventSource(index),
            TrtllmEventSource(index, tls=tls),
            MooncakeEventSource(index),
        )
        self.engines: EventSource = EventSources({"tcp": engines, "http": trtllm, "https": trtllm})
        self.by_kind: Mapping[str, EventSource] = {
            "vLLM": engines,
            "SGLang": engines,
            "TensorRT-LLM": trtllm,
            "Mooncake": mooncake,
        }
        self.index = index
        self._replayable = engines
        self._sources: tuple[EventSource, ...] = (engines, trtllm, mooncake)
        self._push = PushIngest(index, clock)
        self.lmcache = LMCacheDirectory(index)
        self.pools = mooncake
        self.prompts = PromptMatcher(index, self.lmcache)
        self._clock = clock

    def follow_master(self, pool: Holder, master: MasterConfig) -> None:
        """What a Mooncake master tells is what ``pool`` holds."""
        config = StreamConfig(
            holder=pool,
            model=master.model,
            endpoint=master.endpoint,
            replay_endpoint=None,
            topic=master.topic,
            block_size=master.block_size,
        )
        stream = MooncakeStream.of(config, master.admin_endpoint, master.reconcile_s)
        self.by_kind["Mooncake"].add_stream(stream)

    def start(self) -> None:
        for source in self._sources:
            source.start()

    def close(self) -> None:
        for source in self._sources:
            source.close()

    def routers(self) -> list[tuple[APIRouter, str]]:
        """Routes to mount, with their prefixes: pushed events, and LMCache's coordinator protocol."""
        return [
            (make_push_router(self._push), ""),
            (make_lmcache_router(self.lmcache, self._clock), "/lmcache"),
        ]

    def stream_stats(self) -> list[StreamStats]:
        stats = [s for source in self._sources for s in source.stream_stats()]
        return stats + self._push.stream_stats() + self.lmcache.stream_stats()

    @contextmanager
    def paused(self) -> Iterator[Sequence[StreamPosition]]:
        """Nothing of the streams that can resume is applied meanwhile; where they are.

        A holder of which others tell as well is left out: what those told cannot be told apart.
        """
        with self._replayable.paused() as positions:
            others = self._push.stream_stats() + self.lmcache.stream_stats()
            for source in self._sources:
                others += [] if source is self._replayable else source.stream_stats()
            unclear = {stats.holder for stats in others}
            yield [each for each in positions if each.config.holder not in unclear]

    def resume(self, positions: Sequence[StreamPosition]) -> None:
        """Before streams are added: what the index has of them, which was loaded."""
        self._replayable.resume(positions)

    async def expire_forever(self) -> None:
        """Forget LMCache servers that stopped sending heartbeats."""
        while True:
            await asyncio.sleep(_EXPIRY_CHECK_S)
            await asyncio.to_thread(self.lmcache.expire, self._clock())  # of one that held much it takes long
