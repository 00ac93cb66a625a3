"""A byte-level fake engine, a placement service without policy, and the front door between them."""

from __future__ import annotations

import asyncio
import itertools
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from fastapi import APIRouter
from msgspec.structs import replace
from prometheus_client import CollectorRegistry

from conductor.placement import (
    InstanceFailure,
    ModelCard,
    NoInstanceError,
    Placement,
    PlacementRequest,
    PrefixPlan,
    Target,
    UnknownModelError,
    Usage,
)
from router import ApiKey, CorsPolicy, FrontDoorServer, KeyRing, RouterServices, RouterSettings, create_app
from router.workers.client import connect
from router.workers.desk import PlacementDesk
from router.workers.messages import Setup
from tests.support.front_door_process import free_port

MODEL = "test/model"
ANSWER = {
    "id": "chatcmpl-1",
    "object": "chat.completion",
    "created": 1,
    "model": MODEL,
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "hello"}, "finish_reason": "stop"}],
    "usage": {
        "prompt_tokens": 12,
        "total_tokens": 17,
        "completion_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 8},
    },
}
TRANSFER = b'{"do_remote_prefill":true,"remote_block_ids":[[1,2,3]],"remote_engine_id":"e-1","tp_size":1 }'


@dataclass
class Received:
    """A request as the engine saw it."""

    request_line: str
    fields: list[tuple[str, str]]
    body: bytes

    @property
    def document(self) -> Any:
        return orjson.loads(self.body)

    def header(self, name: str) -> str | None:
        values = [value for field_name, value in self.fields if field_name.lower() == name]
        assert len(values) <= 1, f"{name} is repeated: {values}"
        return values[0] if values else None


Respond = Callable[[Received, asyncio.StreamWriter], Awaitable[None]]


def chunk(payload: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(payload), payload)


def event(text: str = "x", **more: Any) -> bytes:
    document = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": MODEL}
    document["choices"] = [{"index": 0, "delta": {"content": text}, "finish_reason": None}]
    return b"data: " + orjson.dumps({**document, **more}) + b"\n\n"


STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ndate: Sat, 21 Nov 2026 00:00:00 GMT\r\nserver: uvicorn\r\n"
    b"content-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
)


def json_response(body: bytes, status: str = "200 OK", extra: bytes = b"") -> bytes:
    return b"HTTP/1.1 %b\r\ncontent-type: application/json\r\n%bcontent-length: %d\r\n\r\n%b" % (
        status.encode(),
        extra,
        len(body),
        body,
    )


class Engine:
    """Speaks just enough HTTP/1.1; ``respond`` decides about every byte of the answer."""

    def __init__(
        self, instance_id: str, respond: Respond | None = None, tls: ssl.SSLContext | None = None
    ) -> None:
        self.instance_id = instance_id
        self.tls = tls
        self.respond = respond or self.answer
        self.received: list[Received] = []
        self.connections = 0
        self.open_connections = 0
        self.port = 0
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    async def __aenter__(self) -> Engine:
        self._server = await asyncio.start_server(
            self._serve, "127.0.0.1", self.port, limit=1 << 26, ssl=self.tls
        )
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        for writer in list(self._writers):
            writer.transport.abort()
        await wait_until(lambda: not self._writers)
        await self._server.wait_closed()

    @property
    def target(self) -> Target:
        scheme = "http" if self.tls is None else "https"
        url = f"{scheme}://127.0.0.1:{self.port}"
        return Target(self.instance_id, url, "127.0.0.1", self.port, tls=self.tls is not None)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.open_connections += 1
        self._writers.add(writer)
        ahead = asyncio.ensure_future(reader.read(1))  # the next request, or the end of the connection
        try:
            while first := await ahead:
                head = first + await reader.readuntil(b"\r\n\r\n")
                lines = head.decode("latin-1").split("\r\n")
                fields = [tuple(line.split(": ", 1)) for line in lines[1:] if line]
                length = next(int(value) for name, value in fields if name.lower() == "content-length")
                request = Received(lines[0], fields, await reader.readexactly(length))  # type: ignore[arg-type]
                self.received.append(request)
                ahead = asyncio.ensure_future(reader.read(1))
                answering = asyncio.ensure_future(self.respond(request, writer))
                await asyncio.wait((answering, ahead), return_when=asyncio.FIRST_COMPLETED)
                if not answering.done():
                    answering.cancel()
                    break
                answering.result()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.open_connections -= 1
            self._writers.discard(writer)
            writer.transport.abort()
            await asyncio.wait((ahead,))
            ahead.exception()

    async def answer(self, request: Received, writer: asyncio.StreamWriter) -> None:
        """What a healthy vLLM does: prefill legs, streams and plain answers."""
        document = request.document
        params = document.get("kv_transfer_params")
        if "token_ids" in document:
            params = document["sampling_params"].get("extra_args", {}).get("kv_transfer_params")
        if params and params.get("do_remote_decode"):
            body = orjson.dumps(ANSWER)[:-1] + b',"kv_transfer_params":' + TRANSFER + b"}"
            writer.write(json_response(body))
        elif document.get("stream"):
            writer.write(STREAM_HEAD)
            for number in range(5):
                writer.write(chunk(event(str(number))))
                await asyncio.sleep(0)
            writer.write(chunk(event("", choices=[], usage=ANSWER["usage"])))
            writer.write(chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
        else:
            writer.write(json_response(orjson.dumps(ANSWER)))
        await writer.drain()


class Placements:
    """Prefill on the first listed instance that is not excluded; decode likewise."""

    def __init__(self, prefill: list[Target], decode: list[Target] | None = None) -> None:
        self.prefill = prefill
        self.decode = decode
        self.calls: list[tuple[str, Any]] = []
        self.asked: list[PlacementRequest] = []
        self.engine_model = MODEL
        self.aliases = {MODEL, "alias"}
        self._numbers = itertools.count(1)

    def place(self, request: PlacementRequest, now_s: float) -> Placement:
        self.asked.append(request)
        if request.model not in self.aliases:
            raise UnknownModelError(f"no instance serves {request.model}")
        prefill = self._first(self.prefill, request)
        decode = prefill if self.decode is None else self._first(self.decode, request)
        placement_id = f"p-{next(self._numbers)}"
        self.calls.append(("place", placement_id))
        plan = PrefixPlan(tokens=16, segments=(), fetch_s=0.0, prefill_s=0.0125)
        return Placement(
            placement_id, request.request_id, self.engine_model, prefill, decode, 16, plan, 0.0125, 0.01
        )

    def anywhere(self, request: PlacementRequest, now_s: float) -> Placement:
        placement = self.place(request, now_s)
        self.calls.remove(("place", placement.placement_id))
        return replace(placement, placement_id="", decode=placement.prefill)

    @staticmethod
    def _first(targets: list[Target], request: PlacementRequest) -> Target:
        for target in targets:
            if target.instance_id not in request.excluded:
                return target
        raise NoInstanceError("every instance is excluded")

    def prefill_finished(self, placement_id: str, now_s: float) -> None:
        self.calls.append(("prefill_finished", placement_id))

    def first_token(self, placement_id: str, now_s: float) -> None:
        self.calls.append(("first_token", placement_id))

    def finished(self, placement_id: str, now_s: float, usage: Usage) -> None:
        if placement_id:
            self.calls.append(("finished", usage))

    def cancelled(self, placement_id: str, now_s: float) -> None:
        if placement_id:
            self.calls.append(("cancelled", placement_id))

    def failed(self, placement_id: str, now_s: float, failure: InstanceFailure) -> None:
        self.calls.append(("failed", failure))

    def models(self) -> list[ModelCard]:
        return [ModelCard(MODEL, 4096, len(self.prefill), aliases=("alias",))]

    def named(self, name: str) -> list[Any]:
        return [value for call, value in self.calls if call == name]

    @property
    def open_placements(self) -> int:
        ended = ("finished", "cancelled", "failed")
        return len(self.named("place")) - sum(call in ended for call, _ in self.calls)


@dataclass
class FrontDoor:
    server: FrontDoorServer
    services: RouterServices
    placements: Placements
    client: httpx.AsyncClient
    registries: list[CollectorRegistry]
    desk: PlacementDesk | None  # of whose worker it is

    async def use_keys(self, keys: Sequence[ApiKey]) -> bool:
        """They were read again."""
        if self.desk is None:
            return self.services.use_keys(keys)
        if not self.desk.services.use_keys(keys):
            return False
        assert self.services.keys is not None
        self.desk.use_keys(list(keys))
        ring = self.services.keys
        await wait_until(lambda: ring.keys == tuple(keys))
        return True

    @property
    def port(self) -> int:
        return self.server.port

    async def chat(self, **fields: Any) -> httpx.Response:
        return await self.client.post("/v1/chat/completions", json=chat_document(**fields))

    async def connect(self, tls: ssl.SSLContext | None = None) -> Connection:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 26, ssl=tls)
        return Connection(reader, writer)

    def sample(self, name: str, **labels: str) -> float:
        return sum(registry.get_sample_value(name, labels) or 0.0 for registry in self.registries)


@dataclass
class Connection:
    """A raw client connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    responses: list[bytes] = field(default_factory=list)

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def response(self) -> tuple[bytes, bytes]:
        """Head and (still framed) body of the next response."""
        head = await self.reader.readuntil(b"\r\n\r\n")
        lowered = head.lower()
        if b"transfer-encoding: chunked" in lowered:
            return head, await self.reader.readuntil(b"0\r\n\r\n")
        if b"content-length: " not in lowered:
            return head, await self.reader.read()
        length = int(lowered.split(b"content-length: ")[1].split(b"\r\n")[0])
        return head, await self.reader.readexactly(length)

    async def close(self) -> None:
        self.writer.transport.abort()
        await asyncio.sleep(0)


def chat_document(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], **fields}


def post(body: bytes, path: str = "/v1/chat/completions", extra: bytes = b"") -> bytes:
    return b"POST %b HTTP/1.1\r\nhost: conductor\r\ncontent-length: %d\r\n%b\r\n%b" % (
        path.encode(),
        len(body),
        extra,
        body,
    )


async def wait_until(condition: Callable[[], bool], deadline_s: float = 5.0) -> None:
    async with asyncio.timeout(deadline_s):
        while not condition():
            await asyncio.sleep(0.005)


class Cluster:
    """Starts engines and front doors and stops them with the test."""

    MODEL = MODEL
    ANSWER = ANSWER
    TRANSFER = TRANSFER
    STREAM_HEAD = STREAM_HEAD
    chunk = staticmethod(chunk)
    event = staticmethod(event)
    json_response = staticmethod(json_response)
    chat_document = staticmethod(chat_document)
    post = staticmethod(post)
    wait_until = staticmethod(wait_until)
    unused_port = staticmethod(free_port)

    def __init__(self, stack: AsyncExitStack, folder: Path | None = None) -> None:
        """With a ``folder`` front doors are those of workers, which ask for placements over a Unix socket there."""
        self.over_a_socket = folder is not None
        self._folder = folder
        self._stack = stack

    async def engine(
        self, instance_id: str = "e0", respond: Respond | None = None, tls: ssl.SSLContext | None = None
    ) -> Engine:
        return await self._stack.enter_async_context(Engine(instance_id, respond, tls))

    async def door(
        self,
        prefill: list[Any],
        decode: list[Any] | None = None,
        *,
        tokens: Any = None,
        keys: KeyRing | None = None,
        cors: CorsPolicy | None = None,
        tracing: Any = None,
        tls: ssl.SSLContext | None = None,
        engine_tls: ssl.SSLContext | None = None,
        verify: ssl.SSLContext | bool = True,
        clock: Callable[[], float] = time.monotonic,
        not_ready_reason: Callable[[], str | None] = lambda: None,
        routers: Iterable[APIRouter] = (),
        **settings: Any,
    ) -> FrontDoor:
        def targets(engines: list[Any]) -> list[Target]:
            return [engine if isinstance(engine, Target) else engine.target for engine in engines]

        placements = Placements(targets(prefill), None if decode is None else targets(decode))
        settings = {"retry_backoff_s": 0.001, "shutdown_timeout_s": 1, **settings}
        services = RouterServices(
            placements,
            settings=RouterSettings(**settings),
            tokens=tokens,
            keys=keys,
            cors=cors,
            tracing=tracing,
            engine_tls=engine_tls,
            clock=clock,
        )
        app = create_app(services, not_ready_reason=not_ready_reason, routers=routers)
        registries, desk = [services.metrics.registry], None
        if self.over_a_socket:
            desk, services = await self._behind_a_desk(services)
            registries.append(services.metrics.registry)
        server = FrontDoorServer(app, services, port=0, tls=tls)
        await server.start()
        self._stack.push_async_callback(server.stop)
        client = httpx.AsyncClient(base_url=server.url, timeout=20, trust_env=False, verify=verify)
        await self._stack.enter_async_context(client)
        return FrontDoor(server, services, placements, client, registries, desk)

    async def _behind_a_desk(self, inner: RouterServices) -> tuple[PlacementDesk, RouterServices]:
        """Services of a worker, whose placements are the inner services'."""
        assert self._folder is not None
        path = self._folder / f"{id(inner):x}.sock"
        setup = Setup(inner.settings, {}, 0, None if inner.keys is None else list(inner.keys.keys), "", "{}")
        desk = PlacementDesk(inner, setup)
        await desk.start(path)
        self._stack.callback(desk.close)
        client = await connect(str(path), 0, 1)
        told = await client.welcomed
        keys = None if told.keys is None else KeyRing(told.keys, client.make_account)
        services = RouterServices(
            client, dispatch=client, settings=told.settings, tokens=inner.tokens, keys=keys, clock=inner.clock
        )
        client.serve(services, tuple)
        client.ready()
        self._stack.push_async_callback(client.close)
        return desk, services


ALSO_OVER_A_SOCKET = ("test_api_keys", "test_failures", "test_hedging", "test_retry_budget", "test_sglang")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A worker's front door behaves as one that has its scheduler with it."""
    if "cluster" in metafunc.fixturenames and metafunc.module.__name__.endswith(ALSO_OVER_A_SOCKET):
        metafunc.parametrize("cluster", ["here", "socket"], indirect=True)


@pytest.fixture
async def cluster(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Cluster]:
    async with AsyncExitStack() as stack:
        yield Cluster(stack, tmp_path if getattr(request, "param", "here") == "socket" else None)


@pytest.fixture
def cluster_type() -> type[Cluster]:
    """For tests that run an event loop of their own."""
    return Cluster
