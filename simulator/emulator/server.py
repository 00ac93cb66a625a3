"""The HTTP surface of the emulated engine, assembled: engines, publishers and routes."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import prometheus_client
import zmq.asyncio
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from simulator.emulator.driver import EngineDriver
from simulator.emulator.hand_off import KvPuller, LinkTimer
from simulator.emulator.inference import InferenceService, Rank
from simulator.emulator.messages_api import MessagesApi, messages_error
from simulator.emulator.metrics import EngineMetrics
from simulator.emulator.openai_api import (
    ApiError,
    DetokenizeRequest,
    TokenizeRequest,
    bad_request,
    parse,
)
from simulator.emulator.pooling_api import PoolingApi
from simulator.emulator.publisher import EventFormat, KvEventPublisher
from simulator.emulator.responder import InferenceEndpoint
from simulator.emulator.responses_api import ResponsesApi
from simulator.emulator.rooms import Rooms, RoomVisitor
from simulator.emulator.tier_admin import TierAdmin
from simulator.emulator.token_apis import TokenApis
from simulator.emulator.tokens import TOKENIZER_FOLDER, ChatTokenizer, TemplateError
from simulator.engine import Engine, EngineLimits
from simulator.host_tier import HostTier
from simulator.kv_cache import KvCache
from simulator.link import SharedLink
from simulator.performance import DEFAULT_PROFILE, PerformanceModel

VERSION: Final = "0.32.0+emulated"


@dataclass(frozen=True, slots=True)
class EmulatorConfig:
    """Everything one emulated engine process is told. Ports of rank ``i`` are offset by ``i``."""

    port: int
    model: str
    host: str = "127.0.0.1"
    advertised_host: str | None = None
    instance_id: str = "engine-0"
    role: str = "mixed"
    kv_event_port: int | None = None
    kv_replay_port: int | None = None
    block_size: int = 16
    kv_blocks: int = 28_000
    host_blocks: int = 0  # of the host tier; 0: none
    max_model_len: int | None = None
    performance: PerformanceModel = DEFAULT_PROFILE
    limits: EngineLimits = field(default_factory=EngineLimits)
    event_format: EventFormat = field(default_factory=EventFormat)
    batch_removals: bool = False
    replay_buffer_steps: int = 10_000
    dp_size: int = 1
    kv_bandwidth_gbps: float = 200.0
    pull_timeout_s: float = 5.0
    hang_on_lost_prefill: bool = False
    hand_off: Literal["vllm-nixl", "sglang"] = "vllm-nixl"
    bootstrap_port: int | None = None
    room_timeout_s: float = 30.0
    tokenizer_folder: Path = TOKENIZER_FOLDER

    def __post_init__(self) -> None:
        room = self.kv_blocks * self.block_size
        if self.max_model_len is not None and self.max_model_len > room:
            raise ValueError(
                f"max_model_len {self.max_model_len} does not fit {self.kv_blocks} blocks of {self.block_size}"
            )
        ports = [port for port in (self.kv_event_port, self.kv_replay_port) if port is not None]
        if len(ports) == 2 and abs(ports[0] - ports[1]) < self.dp_size:
            raise ValueError(f"event and replay ports must be at least {self.dp_size} (dp_size) apart")
        if self.hand_off == "sglang" and self.role == "prefill" and self.bootstrap_port is None:
            raise ValueError("a prefill engine with SGLang's hand-off needs a bootstrap port")
        if self.host_blocks < 0:
            raise ValueError(f"host_blocks must not be negative, as {self.host_blocks} is")
        if self.kv_replay_port is not None and self.kv_event_port is None:
            raise ValueError("a replay port needs an event port")

    @property
    def context_tokens(self) -> int:
        """The longest context a request may have."""
        return self.max_model_len or min(131_072, self.kv_blocks * self.block_size)


class EmulatedEngine:
    """The process's engines and its HTTP application. `running` opens the sockets and runs the engines."""

    def __init__(self, config: EmulatorConfig) -> None:
        self.config = config
        self.created = int(time.time())
        prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
        self._metrics = EngineMetrics(config.model)
        self._zmq = zmq.asyncio.Context()
        self._publishers = [self._publisher(rank) for rank in range(config.dp_size)]
        self._drivers = [self._driver(rank) for rank in range(config.dp_size)]
        self._metrics.watch([driver.engine for driver in self._drivers])
        link = SharedLink(config.kv_bandwidth_gbps * 1e9 / 8 * config.performance.speed)
        lost: Literal["fail", "hang"] = "hang" if config.hang_on_lost_prefill else "fail"
        arriving = LinkTimer(link)
        self._tiers = TierAdmin(self._drivers, arriving, config.performance)
        self._puller = KvPuller(
            arriving,
            kv_bytes_per_token=config.performance.kv_bytes_per_token,
            timeout_s=config.pull_timeout_s,
            lost=lost,
        )
        self._rooms, self._visitor = None, None
        if config.hand_off == "sglang" and config.role == "prefill":
            assert config.bootstrap_port is not None
            self._rooms = Rooms(config.host, config.bootstrap_port)
        elif config.hand_off == "sglang" and config.role == "decode":
            self._visitor = RoomVisitor(
                self._puller,
                timeout_s=config.room_timeout_s,
                unreachable_s=config.pull_timeout_s,
                lost=lost,
            )
        reachable = "127.0.0.1" if config.host in ("0.0.0.0", "::") else config.host
        self._service = InferenceService(
            model=config.model,
            max_model_len=config.context_tokens,
            tokenizer=ChatTokenizer(config.tokenizer_folder),
            ranks=[Rank(driver, str(uuid.uuid4())) for driver in self._drivers],
            puller=self._puller,
            advertised=(config.advertised_host or reachable, config.port),
            rooms=self._rooms,
            visitor=self._visitor,
        )
        self.app = self._application()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run engines and replay sockets; leaving stops them and closes every socket."""
        publishers = [publisher for publisher in self._publishers if publisher is not None]
        tasks = [asyncio.create_task(driver.run()) for driver in self._drivers]
        tasks += [asyncio.create_task(publisher.serve_replay()) for publisher in publishers]
        for task in tasks:
            task.add_done_callback(_crash_loudly)
        try:
            async with self._rooms.open() if self._rooms is not None else contextlib.nullcontext():
                yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._puller.close()
            if self._visitor is not None:
                await self._visitor.close()
            await self._tiers.close()
            for publisher in publishers:
                publisher.close()
            self._zmq.term()

    def _publisher(self, rank: int) -> KvEventPublisher | None:
        config = self.config
        if config.kv_event_port is None:
            return None
        return KvEventPublisher(
            self._zmq,
            address="127.0.0.1" if config.host == "localhost" else config.host,
            event_port=config.kv_event_port + rank,
            replay_port=None if config.kv_replay_port is None else config.kv_replay_port + rank,
            topic=f"kv@{config.host}:{config.port}@{config.model}",
            rank=rank,
            event_format=config.event_format,
            buffer_steps=config.replay_buffer_steps,
        )

    def _driver(self, rank: int) -> EngineDriver:
        config, publisher = self.config, self._publishers[rank]
        host = HostTier(config.host_blocks) if config.host_blocks else None
        cache = KvCache(config.kv_blocks, config.block_size, batch_removals=config.batch_removals, host=host)
        engine = Engine(config.performance, cache, config.limits)
        publish = (lambda events: None) if publisher is None else publisher.publish
        return EngineDriver(engine, publish, self._metrics.observer(rank))

    def _application(self) -> Starlette:
        service = self._service
        pooling, tokens = PoolingApi(service), TokenApis(service)
        return Starlette(
            routes=[
                _post("/v1/chat/completions", InferenceEndpoint(service, service.chat)),
                _post("/v1/completions", InferenceEndpoint(service, service.completion)),
                _post("/v1/responses", InferenceEndpoint(service, ResponsesApi(service).prepare)),
                _post(
                    "/v1/messages", InferenceEndpoint(service, MessagesApi(service).prepare, messages_error)
                ),
                _post("/inference/v1/generate", InferenceEndpoint(service, tokens.tokens)),
                _post("/generate", InferenceEndpoint(service, tokens.generate)),
                Route("/v1/embeddings", pooling.embeddings, methods=["POST"]),
                *(Route(path, pooling.rerank, methods=["POST"]) for path in ("/v1/rerank", "/rerank")),
                *(Route(path, pooling.score, methods=["POST"]) for path in ("/v1/score", "/score")),
                Route("/v1/models", self._models),
                Route("/tokenize", self._tokenize, methods=["POST"]),
                Route("/detokenize", self._detokenize, methods=["POST"]),
                Route("/health", self._health),
                Route("/version", self._version),
                Route("/load", self._load),
                Route("/metrics", self._metrics_page),
                Route("/kv_event_sources", self._kv_event_sources),
                Route("/reset_prefix_cache", self._reset_prefix_cache, methods=["POST"]),
                *self._tiers.routes(),
                Route("/kv_transfers/{request_id:path}", self._transfer, methods=["GET", "DELETE"]),
            ],
            exception_handlers={ApiError: _error_response},
        )

    async def _models(self, request: Request) -> Response:
        card = {
            "id": self.config.model,
            "object": "model",
            "created": self.created,
            "owned_by": "vllm",
            "root": self.config.model,
            "parent": None,
            "max_model_len": self.config.context_tokens,
            "permission": [],
        }
        return JSONResponse({"object": "list", "data": [card]})

    async def _tokenize(self, request: Request) -> Response:
        asked = parse(TokenizeRequest, await request.body())
        self._service.check_model(asked.model)
        tokenizer = self._service.tokenizer
        special = asked.add_special_tokens
        if asked.messages:
            try:
                text = tokenizer.render(
                    asked.messages,
                    asked.tools,
                    add_generation_prompt=asked.add_generation_prompt,
                    template_arguments=asked.chat_template_kwargs,
                )
            except TemplateError as error:
                raise bad_request(str(error), "messages") from None
            tokens = await self._service.encode(text, add_special_tokens=bool(special))
        elif asked.prompt is not None:
            tokens = await self._service.encode(asked.prompt, add_special_tokens=special is not False)
        else:
            raise bad_request("Either prompt or messages is needed.", "prompt")
        body: dict[str, Any] = {
            "count": len(tokens),
            "max_model_len": self.config.context_tokens,
            "tokens": tokens,
            "token_strs": tokenizer.token_strings(tokens) if asked.return_token_strs else None,
        }
        return JSONResponse(body)

    async def _detokenize(self, request: Request) -> Response:
        asked = parse(DetokenizeRequest, await request.body())
        self._service.check_model(asked.model)
        if max(asked.tokens, default=0) >= self._service.tokenizer.vocabulary_size:
            raise bad_request(f"Token id {max(asked.tokens)} is out of vocabulary.", "tokens")
        return JSONResponse({"prompt": self._service.tokenizer.decode(asked.tokens)})

    async def _health(self, request: Request) -> Response:
        return Response()

    async def _version(self, request: Request) -> Response:
        return JSONResponse({"version": VERSION})

    async def _load(self, request: Request) -> Response:
        return JSONResponse({"server_load": self._service.requests})

    async def _metrics_page(self, request: Request) -> Response:
        return Response(self._metrics.render(), media_type=prometheus_client.CONTENT_TYPE_LATEST)

    async def _kv_event_sources(self, request: Request) -> Response:
        sources = enumerate(self._publishers)
        return JSONResponse({str(rank): each.source() for rank, each in sources if each is not None})

    async def _reset_prefix_cache(self, request: Request) -> Response:
        """Clear every rank's cache; 503 if one is in use, and then that rank keeps it."""
        cleared = [driver.reset_prefix_cache() for driver in self._drivers]
        return Response(status_code=200 if all(cleared) else 503)

    async def _transfer(self, request: Request) -> Response:
        """The prefill side of a hand-off: show a lease, or end it."""
        request_id = request.path_params["request_id"]
        for rank in self._service.ranks:
            lease = rank.driver.engine.lease(request_id)
            if lease is None:
                continue
            if request.method == "DELETE":
                rank.driver.release_lease(request_id)
                return Response(status_code=204)
            shown = {"engine_id": rank.engine_id, "tokens": lease.tokens, "blocks": len(lease.blocks)}
            return JSONResponse(shown)
        raise ApiError(404, f"No blocks are leased for {request_id}.", "NotFoundError")


def _post(path: str, endpoint: InferenceEndpoint) -> Route:
    return Route(path, endpoint, methods=["POST"])


async def _error_response(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return JSONResponse(error.body, error.status)


def _crash_loudly(task: asyncio.Task[None]) -> None:
    """An engine whose loop died must not look healthy."""
    if not task.cancelled() and (error := task.exception()) is not None:
        asyncio.get_running_loop().call_exception_handler(
            {"message": "an engine task died", "exception": error, "task": task}
        )
