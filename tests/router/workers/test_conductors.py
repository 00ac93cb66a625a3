"""A router over several conductors, on real sockets: one is asked, another when it is gone, none at last."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from random import Random
from typing import Any

import pytest
from cluster_factory import make_scheduler, request
from msgspec.structs import replace

from conductor.admission import WaitingRoom
from conductor.cli.router_desk import candidates
from conductor.dispatcher import Dispatcher
from conductor.placement import FailureKind, InstanceFailure, Placement, PlacementError, Usage
from router.accounts import KeyLimits
from router.api_keys import ApiKey, KeyRing
from router.services import RouterServices
from router.workers import router_desk
from router.workers.client import PlacementClient
from router.workers.conductors import SILENT_S, Conductor, Conductors
from router.workers.messages import Setup
from router.workers.router_desk import RouterDesk

TOKEN = "a-token-of-tests"
KEY = ApiKey("k", hashlib.sha256(b"k").digest(), tenant="k", limits=KeyLimits(concurrency=2))
LONG = 65_536


async def until(condition: Callable[[], bool], within_s: float = 20.0) -> None:
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.002)


class Waiter:
    def __init__(self) -> None:
        self.told: asyncio.Future[Placement | PlacementError] = asyncio.get_running_loop().create_future()

    def placed(self, placement: Placement) -> None:
        self.told.set_result(placement)

    def refused(self, error: PlacementError) -> None:
        self.told.set_result(error)


class Office:
    """A scheduler whose desk listens on a port of its own."""

    def __init__(self, name: str, room: WaitingRoom | None = None) -> None:
        self.scheduler = make_scheduler("mmm")
        self.scheduler._id_prefix = f"{name}-"
        self.services = RouterServices(
            self.scheduler,
            dispatch=Dispatcher(self.scheduler, room, deadline_s=100.0),
            keys=KeyRing([KEY]),
        )
        setup = Setup(self.services.settings, {}, 0, [KEY], "http://0.0.0.0:80", "{}")
        self.desk = RouterDesk(self.services, setup, TOKEN, lambda: candidates(self.scheduler))
        self.port = 0
        self._telling: asyncio.Task[None] | None = None

    async def open(self) -> None:
        self.port = await self.desk.listen("127.0.0.1", self.port)
        self._telling = asyncio.create_task(self.desk.tell_forever())

    def close(self) -> None:
        """As by kill -9: connections close."""
        assert self._telling is not None
        self._telling.cancel()
        self.desk.close()

    def stand_still(self) -> None:
        """Connections stay open, and nothing is read any more."""
        for link in self.desk.links:
            link._transport.pause_reading()

    @property
    def active(self) -> int:
        self.scheduler.check_invariants()
        return self.scheduler.active_placements


class Router:
    def __init__(self, *offices: Office, token: str = TOKEN) -> None:
        addresses = [Conductor("127.0.0.1", office.port) for office in offices]
        self.conductors = Conductors(addresses, token, time.monotonic, Random(1))
        self.services: RouterServices

    async def start(self) -> Router:
        self.conductors.start()
        setup = await self.conductors.welcomed()
        self.services = RouterServices(self.conductors, dispatch=self.conductors, settings=setup.settings)
        self.conductors.serve(self.services)
        await until(lambda: self.conductors.local.knows_any)
        return self

    async def connected(self) -> Router:
        await until(lambda: all(each.link is not None for each in self.conductors.conductors))
        return self

    def ask(self, tokens: int = 1024, **fields: Any) -> Waiter:
        waiter = Waiter()
        placement = self.services.line.arrive(waiter, request(tokens, **fields), self.services.clock())
        if placement is not None:
            waiter.placed(placement)
        return waiter

    async def placed(self, tokens: int = 1024, **fields: Any) -> Placement:
        outcome = await self.ask(tokens, **fields).told
        assert isinstance(outcome, Placement), outcome
        return outcome


Make = Callable[..., Any]


@pytest.fixture
async def two() -> AsyncIterator[tuple[Office, Office, Router]]:
    async with AsyncExitStack() as stack:
        offices = []
        for name in "ab":
            office = Office(name)
            await office.open()
            stack.callback(office.close)
            offices.append(office)
        router = await (await Router(*offices).start()).connected()
        stack.push_async_callback(router.conductors.close)
        yield (*offices, router)
    await asyncio.sleep(0)


async def test_the_first_is_asked_and_told(two) -> None:
    a, b, router = two
    assert router.conductors.active.name.endswith(str(a.port))
    placement = await router.placed(LONG)
    assert placement.placement_id.startswith("a-") and (a.active, b.active) == (1, 0)
    record = a.scheduler.find(placement.placement_id)
    router.conductors.first_token(placement.placement_id, 0.0)
    router.conductors.finished(placement.placement_id, 0.0, Usage(LONG, 5, 0))
    await until(lambda: a.active == 0)
    assert record.outcome == "finished" and record.first_token_s is not None
    assert router.conductors.local.under_way(placement.prefill.instance_id) == 0
    assert router.conductors.conductors[0].rest_url() == "http://127.0.0.1:80"


@pytest.mark.parametrize("how", ["close", "stand_still"])
async def test_another_is_asked_when_it_is_gone(two, how: str) -> None:
    a, b, router = two
    under_way = await router.placed()
    getattr(a, how)()
    lost_s = time.monotonic()
    waiter = router.ask()  # perhaps to the one that is gone, and then to the other
    outcome = await waiter.told
    assert isinstance(outcome, Placement) and outcome.placement_id.startswith("b-")
    if how == "stand_still":
        assert time.monotonic() - lost_s >= SILENT_S / 2
    assert router.conductors.failovers == 1
    # What the lost one had placed ends without it.
    router.conductors.finished(under_way.placement_id, 0.0, Usage(1, 1, 0))
    router.conductors.finished(outcome.placement_id, 0.0, Usage(1, 1, 0))
    await until(lambda: b.active == 0)
    assert not router.conductors._placed


async def test_alone_by_lot_and_back(two) -> None:
    a, b, router = two
    for office in (a, b):
        office.close()
    await until(lambda: router.conductors.active is None)
    placements = [await router.placed() for _ in range(12)]
    assert all(placement.placement_id.startswith("local-") for placement in placements)
    counts = [router.conductors.local.under_way(f"m{n}") for n in range(3)]
    assert sum(counts) == 12 and max(counts) <= 7
    failure = InstanceFailure("m0", FailureKind.UNREACHABLE, "refused")
    router.conductors.failed(placements[0].placement_id, time.monotonic(), failure)
    assert {(await router.placed()).prefill.instance_id for _ in range(12)} == {"m1", "m2"}
    unknown = await _refusal(router, model="nobody")
    assert "not served" in str(unknown)
    again = Office("c")
    again.port = b.port
    await again.open()
    await until(lambda: router.conductors.active is not None)
    assert (await router.placed()).placement_id.startswith("c-")
    again.close()


async def _refusal(router: Router, **fields: Any) -> PlacementError:
    waiter = Waiter()
    try:
        router.services.line.arrive(waiter, request(16, **fields), router.services.clock())
    except PlacementError as error:
        return error
    outcome = await waiter.told
    assert isinstance(outcome, PlacementError)
    return outcome


async def test_who_waits_in_the_room_of_a_lost_conductor_is_asked_for_again() -> None:
    a, b = Office("a", WaitingRoom(10)), Office("b")
    await a.open()
    await b.open()
    router = await (await Router(a, b).start()).connected()
    waiters = [router.ask(LONG, seed=seed) for seed in range(6)]
    await until(lambda: len(a.services.line) >= 1)
    a.close()
    outcomes = [await waiter.told for waiter in waiters]
    assert {outcome.placement_id[:2] for outcome in outcomes} == {"a-", "b-"}
    assert len({outcome.placement_id for outcome in outcomes}) == 6
    await router.conductors.close()
    b.close()


async def test_who_leaves_while_a_silent_conductor_is_given_up_is_asked_for_nowhere(two) -> None:
    a, b, router = two
    first = router.conductors.conductors[0]
    client = first.link
    a.stand_still()
    waiters = [router.ask(seed=seed) for seed in range(3)]
    async with asyncio.timeout(20):
        while not client._transport.is_closing():
            await asyncio.sleep(0)
    router.services.line.leave(waiters.pop(1))
    for waiter in waiters:
        outcome = await waiter.told
        assert isinstance(outcome, Placement) and outcome.placement_id.startswith("b-")
    assert b.active == 2
    assert len(router.conductors._placed) == 2


async def test_limits_of_keys_go_with_their_requests(two) -> None:
    a, b, router = two
    account = router.conductors.make_account(KEY, router_tenant())
    grants = [account.enter(0.0) for _ in range(3)]
    for grant in grants[:2]:
        await router.placed(grant=grant.number)
    assert "limited to 2 requests at a time" in str(await _refusal(router, grant=grants[2].number))
    a.close()
    await until(lambda: router.conductors.active.name.endswith(str(b.port)))
    grants.append(account.enter(0.0))
    assert (await router.placed(grant=grants[3].number)).placement_id.startswith("b-")
    for grant in grants:
        grant.end(0.0, failed=False, prompt_tokens=None, output_tokens=None)
    await until(lambda: len(next(iter(b.desk.links))._grants) == 0)


async def test_a_key_that_a_conductor_has_no_longer_costs_only_its_own_requests() -> None:
    """The router began with it, and the conductor was started again without."""
    a = Office("a")
    a.services.keys = KeyRing([])
    await a.open()
    router = await Router(a).start()
    await router.placed(LONG)
    grant = router.conductors.make_account(KEY, router_tenant()).enter(0.0)
    assert "The API key is not known here" in str(await _refusal(router, grant=grant.number))
    grant.end(0.0, failed=True, prompt_tokens=None, output_tokens=None)
    await router.placed()
    assert router.conductors.failovers == 0 and a.active == 2
    assert len(next(iter(a.desk.links))._grants) == 0
    await router.conductors.close()
    a.close()


async def test_keys_that_are_read_again_reach_routers(two) -> None:
    """Those of the conductor that is asked: both, when they are changed, and when it is another one."""
    a, b, router = two
    services = RouterServices(router.conductors, keys=KeyRing([KEY], router.conductors.make_account))
    router.conductors.serve(services)
    account = services.keys.accounts["k"]
    others = [ApiKey(name, hashlib.sha256(name.encode()).digest(), tenant=name) for name in "xyz"]
    for office, keys in ((b, [others[0]]), (a, [KEY, others[1]])):
        assert office.services.use_keys(keys)
        office.desk.use_keys(keys)
    await until(lambda: services.keys.keys == (KEY, others[1]))
    assert services.keys.accounts["k"] is account
    a.close()
    await until(lambda: services.keys.keys == (others[0],))
    a.desk.setup = replace(a.desk.setup, keys=[others[2]])  # as after a start with another file
    b.close()
    await a.open()
    await until(lambda: services.keys.keys == (others[2],))


def router_tenant():
    return KeyRing([KEY]).accounts["k"].tenant


async def test_who_has_no_token_gets_nothing() -> None:
    a = Office("a")
    await a.open()
    router = Router(a, token="another")
    router.conductors.start()
    await asyncio.sleep(0.6)
    assert router.conductors.active is None and not router.conductors.local.knows_any
    await router.conductors.close()
    a.close()


async def test_changes_of_the_cluster_are_told(two) -> None:
    a, _, router = two
    a.scheduler.instance_down("m0", "gone")
    a.desk.instance_lost("m0", "gone")
    await until(lambda: len(router.conductors.local._told.instances) == 2)


async def test_a_router_whose_machine_is_gone_gives_everything_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """No end of its connection is ever seen."""
    monkeypatch.setattr(router_desk, "_TELL_EVERY_S", 0.05)
    a = Office("a")
    await a.open()
    alive = await Router(a).start()
    await alive.placed(LONG)
    loop = asyncio.get_running_loop()
    _, silent = await loop.create_connection(PlacementClient, "127.0.0.1", a.port)
    silent.greet(-1, 1, TOKEN)
    silent.serve(RouterServices(silent, dispatch=silent), tuple)
    account = silent.make_account(KEY, router_tenant())
    for grant in (account.enter(0.0).number, 0):
        waiter = Waiter()
        silent._services.line.arrive(waiter, request(LONG, grant=grant), 0.0)
        assert isinstance(await waiter.told, Placement)
    assert a.active == 3 and a.services.keys.accounts["k"].tenant.active == 1
    await until(lambda: a.active == 1)
    assert a.services.keys.accounts["k"].tenant.active == 0
    assert len(a.desk.links) == 1 and alive.conductors.failovers == 0
    await silent.lost
    await alive.conductors.close()
    a.close()
