"""The picker's server on a real connection, whose other end goes without a word."""

from __future__ import annotations

import asyncio
import hashlib
from contextlib import AsyncExitStack

import grpc
import orjson
import pytest
from cluster_factory import make_scheduler

from conductor.dispatcher import Dispatcher
from router import KeyRing, RouterServices
from router.accounts import KeyLimits
from router.api_keys import ApiKey
from router.ext_proc import server as picker
from router.ext_proc.messages import BODY_FULL_DUPLEX_STREAMED, ProcessingRequest
from router.ext_proc.stream import Surroundings

KEY = ApiKey("k", hashlib.sha256(b"secret").digest(), tenant="k", limits=KeyLimits(concurrency=2))


class Wire:
    """Between a gateway and the picker; once it is ``cut``, nothing passes and no end is told of."""

    def __init__(self, port: int) -> None:
        self.cut = False
        self._port = port
        self._passing: list[asyncio.Task[None]] = []
        self._writers: list[asyncio.StreamWriter] = []

    async def open(self) -> int:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()
        await asyncio.gather(*self._passing, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there = await asyncio.open_connection("127.0.0.1", self._port)
        self._writers += (writer, there[1])
        for source, target in ((reader, there[1]), (there[0], writer)):
            self._passing.append(asyncio.create_task(self._pass(source, target)))

    async def _pass(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        while data := await source.read(65_536):
            if not self.cut:
                target.write(data)


def requests(body: bytes) -> list[bytes]:
    head = ProcessingRequest()
    head.protocol_config.request_body_mode = BODY_FULL_DUPLEX_STREAMED
    for name, value in ((":path", "/v1/completions"), ("authorization", "Bearer secret")):
        head.request_headers.headers.headers.add(key=name, raw_value=value.encode())
    rest = ProcessingRequest()
    rest.request_body.body = body
    rest.request_body.end_of_stream = True
    return [head.SerializeToString(), rest.SerializeToString()]


async def test_a_gateway_whose_machine_is_gone_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(picker, "_PING_MS", 600)
    scheduler = make_scheduler("m")
    services = RouterServices(scheduler, dispatch=Dispatcher(scheduler), keys=KeyRing([KEY]))
    targets = [instance.ranks[0].target for instance in scheduler.cluster]
    served = picker.PickerServer(
        Surroundings(services, lambda: targets, lambda placement_id: ()),
        lambda: None,
        host="127.0.0.1",
        port=0,
    )
    async with AsyncExitStack() as stack:
        await served.start()
        stack.callback(services.close)
        stack.push_async_callback(served.stop, 0.0)
        wire = Wire(served.port)
        address = f"127.0.0.1:{await wire.open()}"
        stack.push_async_callback(wire.close)
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(address))
        call = channel.stream_stream(f"/{picker.SERVICE}/Process")()
        body = orjson.dumps({"model": "llama", "prompt": [1, 2, 3], "max_tokens": 1})
        for message in requests(body):
            await call.write(message)
        await call.read()
        assert services.keys is not None
        assert services.keys.accounts["k"].tenant.active == scheduler.active_placements == 1
        wire.cut = True
        async with asyncio.timeout(30):
            while services.keys.accounts["k"].tenant.active or scheduler.active_placements:
                await asyncio.sleep(0.02)
        call.cancel()
