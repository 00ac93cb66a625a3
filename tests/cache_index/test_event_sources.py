"""Sources as one, by the scheme of the endpoint."""

from __future__ import annotations

import pytest

from cache_index import CacheIndex, EventSource, Holder, StreamConfig, VllmEventSource
from cache_index.event_sources import EventSources
from cache_index.trtllm import TrtllmEventSource


def config(endpoint: str, holder: Holder) -> StreamConfig:
    return StreamConfig(holder, "tiny", endpoint, None)


def test_the_scheme_says_who_follows() -> None:
    index = CacheIndex()
    zmq_source, polling = VllmEventSource(index), TrtllmEventSource(index)
    sources: EventSource = EventSources({"tcp": zmq_source, "ipc": zmq_source, "http": polling})
    sources.start()
    try:
        sources.add_stream(config("tcp://127.0.0.1:1", Holder("a")))
        sources.add_stream(config("http://127.0.0.1:1", Holder("b")))
        assert [each.holder for each in zmq_source.stream_stats()] == [Holder("a")]
        assert [each.holder for each in polling.stream_stats()] == [Holder("b")]
        sources.resync(Holder("a"))
        sources.add_stream(config("http://127.0.0.1:1", Holder("a")))
        assert zmq_source.stream_stats() == []
        assert {each.holder for each in sources.stream_stats()} == {Holder("a"), Holder("b")}
        sources.remove_stream(Holder("a"))
        assert [each.holder for each in sources.stream_stats()] == [Holder("b")]
        with pytest.raises(ValueError, match="one of http, ipc, tcp"):
            sources.add_stream(config("carrier-pigeon://roof", Holder("c")))
    finally:
        sources.close()
