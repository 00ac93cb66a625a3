"""Everything at once before real schedulers: at the end nothing is reserved, counted or waiting any more.

Engines fail in every way, instances go down and come back, requests are hedged and placed again, clients leave at
any moment, routers lose their conductors. CONDUCTOR_STORM_SEED and CONDUCTOR_STORM_S make other and longer storms.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import orjson
import pytest
from cluster_factory import ROLES, facts

from cache_index import CacheIndex
from conductor.admission import WaitingRoom
from conductor.catalogue import LLAMA_8B_H100
from conductor.circuit import SuspensionPolicy
from conductor.cli.router_desk import candidates
from conductor.cluster import Cluster as Instances
from conductor.cluster import Health, make_instance
from conductor.dispatcher import Dispatcher
from conductor.placement import Objectives
from conductor.policies import make_policy
from conductor.scheduler import Scheduler
from router import FrontDoorServer, KeyRing, RouterServices, RouterSettings, create_app
from router.accounts import KeyLimits
from router.api_keys import ApiKey
from router.workers.client import connect
from router.workers.conductors import Conductor, Conductors
from router.workers.desk import PlacementDesk
from router.workers.messages import Setup
from router.workers.router_desk import RouterDesk

SEED = int(os.environ.get("CONDUCTOR_STORM_SEED", "1"))
LASTS_S = float(os.environ.get("CONDUCTOR_STORM_S", "5"))
CALM_S = 20.0  # within which everything must be over
CLIENTS = 30
KEY = ApiKey("k", hashlib.sha256(b"secret").digest(), tenant="k", limits=KeyLimits(concurrency=24))
SETTINGS = RouterSettings(
    retry_backoff_s=0.005,
    retry_burst=1e6,
    hedge_quantile=0.5,
    hedge_least_s=0.002,
    first_byte_timeout_s=1.0,
    prefill_timeout_s=1.0,
    stall_timeout_s=1.0,
    client_buffer_bytes=200,
    shutdown_timeout_s=1,
    log_requests=False,
)
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": list(range(20))}),
    ("/v1/completions", {"prompt": list(range(3_000))}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
    ("/pick/v1/completions", {"prompt": list(range(100))}),
    ("/v1/embeddings", {"input": "x"}),
    ("/tokenize", {"prompt": "x"}),
]
MODELS = ("llama", "llama", "llama", "adapter", "nobody")
MOMENTS_S = (0.0, 0.0, 0.001, 0.01, 0.05)


class Office:
    """A conductor: its scheduler, and the services that place for others."""

    def __init__(self, engines: dict[str, Any], prefix: str, room: bool) -> None:
        instances = Instances()
        for name, engine in engines.items():
            instances.add(
                make_instance(
                    instance_id=name,
                    url=f"http://127.0.0.1:{engine.port}",
                    role=ROLES[name[0]],
                    instance_class=LLAMA_8B_H100,
                    protocol="vllm-nixl",
                )
            )
        self.scheduler = Scheduler(
            instances,
            CacheIndex(),
            make_policy("slo"),
            Objectives(ttft_s=2.0, tbt_s=0.05),
            SuspensionPolicy(after_failures=3, pause_s=0.05),
            id_prefix=prefix,
        )
        self.bring_up()
        waiting = WaitingRoom(6) if room else None
        dispatcher = Dispatcher(self.scheduler, waiting, deadline_s=0.2, hold_above_s=0.02)
        self.services = RouterServices(
            self.scheduler, dispatch=dispatcher, settings=SETTINGS, keys=KeyRing([KEY])
        )
        self.desk: PlacementDesk | None = None

    def bring_up(self) -> None:
        for instance in list(self.scheduler.cluster):
            if instance.health in (Health.DOWN, Health.STARTING):
                self.scheduler.instance_up(instance.instance_id, facts())

    def left_behind(self) -> list[object]:
        scheduler, services = self.scheduler, self.services
        scheduler.check_invariants()
        assert services.keys is not None
        links = () if self.desk is None else self.desk.links
        return [
            scheduler.active_placements,
            scheduler._circuits.probes,
            services.keys.accounts["k"].tenant.active,
            len(services.line),
            services.line._tickets,
            services.picks._open,
            *((link._active, link._held, link._grants._entered) for link in links),
        ]


class Storm:
    """Engines, conductors, a front door before them, and what happens to all of these."""

    def __init__(self, cluster: Any, stack: AsyncExitStack, folder: Path) -> None:
        self.cluster, self.folder = cluster, folder
        self.draw = random.Random(SEED)
        self.answers: set[int] = set()
        self.offices: list[Office] = []
        self.engine: Any = None
        self.services: RouterServices
        self.conductors: Conductors | None = None
        self._stack = stack
        self._ends_s = time.monotonic() + LASTS_S

    async def prepare(self, where: str, roles: str, room: bool) -> None:
        names = [f"{role}{number}" for number, role in enumerate(roles)]
        engines = {name: await self.cluster.engine(name, self.respond) for name in names}
        self.engine = engines[names[0]]  # its own answers are all of theirs
        self.offices = [Office(engines, f"{n}-", room) for n in range(2 if where == "routers" else 1)]
        open_door = {"here": self._here, "workers": self._workers, "routers": self._routers}[where]
        self.services = await open_door()
        self.server = FrontDoorServer(create_app(self.services), self.services, port=0)
        await self.server.start()
        self._stack.push_async_callback(self.server.stop)
        self._ends_s = time.monotonic() + LASTS_S

    async def _here(self) -> RouterServices:
        return self.offices[0].services

    async def _workers(self) -> RouterServices:
        office, path = self.offices[0], self.folder / "desk"
        office.desk = PlacementDesk(office.services, self._setup())
        await office.desk.start(path)
        self._stack.callback(office.desk.close)
        client = await connect(str(path), 0, 1)
        await client.welcomed
        services = RouterServices(
            client, dispatch=client, settings=SETTINGS, keys=KeyRing([KEY], client.make_account)
        )
        client.serve(services, tuple)
        client.ready()
        self._stack.push_async_callback(client.close)
        return services

    async def _routers(self) -> RouterServices:
        addresses = []
        for office in self.offices:
            scheduler = office.scheduler
            desk = RouterDesk(
                office.services, self._setup(), "t", lambda scheduler=scheduler: candidates(scheduler)
            )
            office.desk = desk
            addresses.append(Conductor("127.0.0.1", await desk.listen("127.0.0.1", 0)))
            self._stack.callback(desk.close)
            self._stack.callback(asyncio.create_task(desk.tell_forever()).cancel)
        conductors = self.conductors = Conductors(addresses, "t", time.monotonic, self.draw)
        conductors.start()
        self._stack.push_async_callback(conductors.close)
        await conductors.welcomed()
        services = RouterServices(
            conductors, dispatch=conductors, settings=SETTINGS, keys=KeyRing([KEY], conductors.make_account)
        )
        conductors.serve(services)
        return services

    def _setup(self) -> Setup:
        return Setup(SETTINGS, {}, 0, [KEY], "", "{}")

    @property
    def over(self) -> bool:
        return time.monotonic() > self._ends_s

    # What happens

    async def respond(self, request: Any, writer: asyncio.StreamWriter) -> None:
        """As a healthy engine, five times in six."""
        fate = self.draw.random()
        await asyncio.sleep(self.draw.choice(MOMENTS_S))
        if fate < 0.05:
            writer.transport.abort()
        elif fate < 0.10:
            writer.write(b"HTTP/1.1 500 Internal Server Error\r\ncontent-length: 6\r\n\r\nbroken")
        elif fate < 0.13:
            writer.write(self.cluster.json_response(b"{}", "400 Bad Request"))
        elif fate < 0.15:
            writer.write(b"garbage\r\n\r\n")
        elif fate < 0.17:
            await asyncio.sleep(30)
        elif fate < 0.20 and request.document.get("stream"):
            writer.write(self.cluster.STREAM_HEAD + self.cluster.chunk(self.cluster.event("x")))
            await asyncio.sleep(self.draw.choice(MOMENTS_S))
            writer.transport.abort()
        else:
            await self.engine.answer(request, writer)

    async def client(self) -> None:
        while not self.over:
            reader, writer = await asyncio.open_connection("127.0.0.1", self.server.port)
            try:
                while await self.ask(reader, writer):
                    pass
            except (ConnectionError, asyncio.IncompleteReadError):
                pass
            finally:
                writer.transport.abort()

    async def ask(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """One request; whether the connection can take another one."""
        draw = self.draw
        path, fields = draw.choice(REQUESTS)
        document = {"model": draw.choice(MODELS), "max_tokens": 4, "stream": draw.random() < 0.5, **fields}
        data = self.cluster.post(orjson.dumps(document), path, b"authorization: Bearer secret\r\n")
        fate = draw.random()
        if fate < 0.08:
            data = data[: draw.randint(1, len(data) - 1)]
        elif fate < 0.20:
            data *= 2
        writer.write(data)
        if fate < 0.08 or fate > 0.85:
            await asyncio.sleep(draw.choice((*MOMENTS_S, 0.1)))
            return False
        async with asyncio.timeout(CALM_S):
            head = await reader.readuntil(b"\r\n\r\n")
        self.answers.add(int(head.split()[1]))
        if fate < 0.20 or b"content-length: " not in head.lower():
            await asyncio.sleep(draw.choice(MOMENTS_S))
            return False
        await reader.readexactly(int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]))
        return not self.over

    async def disorder(self) -> None:
        draw = self.draw
        while not self.over:
            await asyncio.sleep(draw.choice((0.01, 0.05, 0.2)))
            for office in self.offices:
                office.bring_up()
            if draw.random() < 0.5:
                name = draw.choice([each.instance_id for each in self.offices[0].scheduler.cluster])
                for office in self.offices:
                    office.scheduler.instance_down(name, "storm")
                self.services.instance_lost(name, "storm")
            desk = draw.choice(self.offices).desk
            if self.conductors is not None and desk is not None and draw.random() < 0.1:
                for link in list(desk.links):
                    link.close()

    def left_behind(self) -> list[object]:
        """Of the router's own, and of every conductor's."""
        services, conductors = self.services, self.conductors
        pools = services.pool._instances.values()
        left: list[object] = [
            services.active,
            len(services.line),
            services.picks._open,
            sum(pool.connecting for pool in pools),
            [each for pool in pools for each in pool.open_connections if each not in pool.idle],
        ]
        if conductors is not None:
            left += [
                conductors._placed,
                conductors._accounts,
                conductors._answers,
                conductors.local._under_way,
            ]
        return [
            each for each in left + [part for o in self.offices for part in o.left_behind()] if any_of(each)
        ]


def any_of(left: object) -> bool:
    return any(map(any_of, left)) if isinstance(left, tuple) else bool(left)


@pytest.mark.extended
@pytest.mark.parametrize(
    ("where", "roles", "room"),
    [
        ("here", "mmmm", True),
        ("here", "ppdd", False),
        ("workers", "mmmm", False),
        ("workers", "ppdd", True),
        ("routers", "mmmm", True),
        ("routers", "ppdd", False),
    ],
)
@pytest.mark.timeout(120 + 2 * LASTS_S)
async def test_after_a_storm_nothing_is_left(
    cluster: Any, tmp_path: Path, where: str, roles: str, room: bool
) -> None:
    async with AsyncExitStack() as stack:
        storm = Storm(cluster, stack, tmp_path)
        await storm.prepare(where, roles, room)
        await asyncio.gather(*(storm.client() for _ in range(CLIENTS)), storm.disorder())
        calm_s = time.monotonic() + CALM_S
        while storm.left_behind() and time.monotonic() < calm_s:
            await asyncio.sleep(0.05)
        assert not storm.left_behind()
        assert {200, 400, 404, 429} <= storm.answers and 500 not in storm.answers
        hedges = storm.services.metrics.hedges
        assert sum(hedges.values()), hedges
