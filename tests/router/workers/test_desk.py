"""Two ends of a real socket: a scheduler behind the desk, workers that come, ask, report and vanish."""

from __future__ import annotations

import asyncio
import hashlib
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from cluster_factory import make_scheduler, request

from conductor.admission import WaitingRoom
from conductor.dispatcher import Dispatcher
from conductor.placement import (
    FailureKind,
    InstanceFailure,
    Placement,
    PlacementError,
    RejectedError,
    UnknownModelError,
    Usage,
)
from router.api_keys import ApiKey, KeyRing
from router.services import RouterServices
from router.workers.client import PlacementClient, connect
from router.workers.desk import PlacementDesk
from router.workers.frames import FrameReader, frame
from router.workers.messages import Hello, MetricFamily, Setup, Welcome, encode, from_conductor

LONG = 65_536  # tokens; seconds of prefill


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.002)


class Waiter:
    """Somebody at a worker who waits for a placement."""

    def __init__(self) -> None:
        self.told: asyncio.Future[Placement | PlacementError] = asyncio.get_running_loop().create_future()

    def placed(self, placement: Placement) -> None:
        self.told.set_result(placement)

    def refused(self, error: PlacementError) -> None:
        self.told.set_result(error)


class Worker:
    """The part of a worker's process that talks to the conductor."""

    def __init__(self, client: PlacementClient, setup: Setup) -> None:
        self.client = client
        self.services = RouterServices(client, dispatch=client, settings=setup.settings)
        self.families: list[MetricFamily] = []
        client.serve(self.services, lambda: self.families)
        client.ready()

    def ask(self, tokens: int = 1024, **fields: Any) -> Waiter:
        waiter = Waiter()
        assert self.services.line.arrive(waiter, request(tokens, **fields), self.services.clock()) is None
        return waiter

    async def placed(self, tokens: int = 1024, **fields: Any) -> Placement:
        outcome = await self.ask(tokens, **fields).told
        assert isinstance(outcome, Placement), outcome
        return outcome


class Office:
    """A scheduler, its desk, and as many workers as a test wants."""

    def __init__(self, stack: AsyncExitStack, path: Path, room: WaitingRoom | None, roles: str) -> None:
        self.scheduler = make_scheduler(roles)
        self.services = RouterServices(
            self.scheduler, dispatch=Dispatcher(self.scheduler, room, deadline_s=100.0)
        )
        self.path = path
        self.samples: list[tuple[int, list[MetricFamily]]] = []
        self.gone: list[int] = []
        self.desk = PlacementDesk(self.services, Setup(self.services.settings, {}, 0, None, "rest", "{}"))
        self.desk.on_samples = lambda worker, families: self.samples.append((worker, families))
        self.desk.on_gone = self.gone.append
        self._stack = stack

    async def worker(self, number: int = 0) -> Worker:
        client = await connect(str(self.path), number, 1000 + number)
        self._stack.push_async_callback(client.close)
        worker = Worker(client, await client.welcomed)
        await until(lambda: number in self.desk.ready_workers())
        return worker

    @property
    def active(self) -> int:
        self.scheduler.check_invariants()
        return self.scheduler.active_placements


Open = Callable[..., Any]


@pytest.fixture
async def office(tmp_path: Path) -> AsyncIterator[Open]:
    async with AsyncExitStack() as stack:

        async def open_office(room: WaitingRoom | None = None, roles: str = "ppdd") -> Office:
            opened = Office(stack, tmp_path / "desk", room, roles)
            await opened.desk.start(opened.path)
            stack.callback(opened.desk.close)
            return opened

        yield open_office
        await asyncio.sleep(0)


async def test_a_placement_from_asking_to_its_end(office: Open) -> None:
    at = await office()
    worker = await at.worker()
    placement = await worker.placed()
    assert placement.disaggregated
    record = at.scheduler.find(placement.placement_id)
    assert record is not None
    assert record.request.tokens.tolist() == request(1024).tokens.tolist()
    worker.client.prefill_finished(placement.placement_id, 0.0)
    worker.client.first_token(placement.placement_id, 0.0)
    await until(lambda: record.first_token_s is not None)
    worker.client.finished(placement.placement_id, 0.0, Usage(1024, 5, 0))
    await until(lambda: at.active == 0)
    assert (record.outcome, record.usage) == ("finished", Usage(1024, 5, 0))


async def test_everything_of_one_turn_is_placed_knowing_of_each_other(office: Open) -> None:
    at = await office()
    worker = await at.worker()
    waiters = [worker.ask(LONG, seed=seed) for seed in range(4)]
    placements = [await waiter.told for waiter in waiters]
    used = [p.prefill.instance_id for p in placements if isinstance(p, Placement)]
    assert sorted(used) == ["p0", "p0", "p1", "p1"], "a burst spreads"
    assert at.active == 4


async def test_failures_reach_the_scheduler(office: Open) -> None:
    at = await office(roles="mm")
    worker = await at.worker()
    placement = await worker.placed()
    instance = placement.prefill.instance_id
    failure = InstanceFailure(instance, FailureKind.UNREACHABLE, "refused")
    worker.client.failed(placement.placement_id, 0.0, failure)
    await until(lambda: at.active == 0)
    again = await worker.placed(excluded=frozenset([instance]), retry_of=placement.placement_id)
    assert again.prefill.instance_id != instance
    assert not at.scheduler.cluster[instance].is_candidate(0.0)


async def test_an_unknown_model_is_told_what_is_served(office: Open) -> None:
    at = await office()
    worker = await at.worker()
    error = await worker.ask(model="absent").told
    assert isinstance(error, UnknownModelError)
    assert [card.model for card in worker.client.models()] == ["llama", "adapter"]


async def test_work_that_is_no_load_is_sent_anywhere(office: Open) -> None:
    at = await office()
    worker = await at.worker()
    waiter = Waiter()
    assert worker.services.line.hold(waiter, worker.client.anywhere(request(10), 0.0)) is None
    placement = await waiter.told
    assert isinstance(placement, Placement)
    assert placement.placement_id == ""
    assert at.active == 0


async def test_an_engine_to_tokenize_with_is_found(office: Open) -> None:
    at = await office(roles="m")
    worker = await at.worker()
    assert await worker.client.any_url("llama") == "http://10.0.0.0:8000"
    assert await worker.client.any_url("absent") is None
    asking = asyncio.create_task(worker.client.any_url("llama"))
    await asyncio.sleep(0)
    asking.cancel()
    await asyncio.wait((asking,))
    assert len(worker.services.line) == 0, "who is cancelled waits no longer"
    at.desk.close()
    await worker.client.lost
    assert await worker.client.any_url("llama") is None


async def test_a_worker_that_dies_gives_everything_back(office: Open) -> None:
    at = await office(WaitingRoom(8), "m")
    dying, other = await at.worker(0), await at.worker(1)
    first = await dying.placed(LONG)
    held = [dying.ask(1024, seed=1), dying.ask(1024, seed=2)]
    waiting = other.ask(1024, seed=3)
    await until(lambda: len(at.services.line) == 3)
    assert at.active == 1
    dying.client._transport.abort()
    survivor = await waiting.told
    assert isinstance(survivor, Placement), "the line moves on at once"
    record = at.scheduler.find(first.placement_id)
    assert record is not None
    assert record.outcome == "cancelled"
    assert at.active == 1
    assert at.gone == [0]
    assert not any(waiter.told.done() for waiter in held)
    await dying.client.lost
    with pytest.raises(PlacementError, match="stopped"):
        dying.services.line.arrive(Waiter(), request(10), 0.0)
    again = await at.worker(0)
    again.ask(10)
    await until(lambda: len(at.services.line) + at.active == 2)


async def test_who_leaves_the_line_is_not_placed(office: Open) -> None:
    at = await office(WaitingRoom(8), "m")
    worker = await at.worker()
    first = await worker.placed(LONG)
    leaving, staying = worker.ask(1024, seed=1), worker.ask(1024, seed=2)
    await until(lambda: len(at.services.line) == 2)
    worker.services.line.leave(leaving)
    await until(lambda: len(at.services.line) == 1)
    worker.client.cancelled(first.placement_id, 0.0)
    assert isinstance(await staying.told, Placement)
    assert not leaving.told.done()


async def test_who_leaves_while_its_answer_is_under_way_keeps_no_placement(office: Open) -> None:
    at = await office()
    worker = await at.worker()
    leaving = worker.ask()
    worker.services.line.leave(leaving)  # in the same turn: asked, left and answered cross
    await worker.placed()
    await until(lambda: at.active == 1)
    assert not leaving.told.done()


async def test_a_placement_can_be_revoked_between_its_legs(
    office: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = await office()
    worker = await at.worker()
    placement = await worker.placed()
    revoked: list[tuple[str, PlacementError]] = []
    monkeypatch.setattr(
        worker.services,
        "placement_revoked",
        lambda placement_id, error: revoked.append((placement_id, error)),
    )

    def judge(*_: object) -> Any:
        return type("Rejection", (), {"reason": "full", "stage": "decode", "retry_after_s": 2.0})

    monkeypatch.setattr(at.scheduler.gate, "judge_decode", judge)
    worker.client.prefill_finished(placement.placement_id, 0.0)
    await until(lambda: bool(revoked))
    placement_id, error = revoked[0]
    assert placement_id == placement.placement_id
    assert isinstance(error, RejectedError)
    assert (error.stage, error.retry_after_s) == ("decode", 2.0)
    assert at.active == 0


async def test_a_lost_instance_is_told_to_every_worker(office: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    at = await office()
    told: list[tuple[int, str, str]] = []
    for number in range(2):
        worker = await at.worker(number)
        monkeypatch.setattr(
            worker.services,
            "instance_lost",
            lambda instance, reason, number=number: told.append((number, instance, reason)),
        )
    at.desk.instance_lost("p0", "gone")
    await until(lambda: len(told) == 2)
    assert sorted(told) == [(0, "p0", "gone"), (1, "p0", "gone")]


async def test_keys_that_are_read_again_are_told_to_every_worker(office: Open) -> None:
    first, second = (ApiKey(name, hashlib.sha256(name.encode()).digest(), tenant=name) for name in "ab")
    at = await office()
    worker = await at.worker(0)
    worker.services.keys = KeyRing([first], worker.client.make_account)
    at.desk.use_keys([first, second])
    await until(lambda: worker.services.keys.keys == (first, second))
    late = await connect(str(at.path), 1, 1)
    assert (await late.welcomed).keys == [first, second]
    at.desk.use_keys([second])
    await until(lambda: worker.services.keys.keys == (second,))
    services = RouterServices(late, dispatch=late, keys=KeyRing([first, second]))
    late.serve(services, tuple)  # which had not begun when it was told
    assert services.keys is not None and services.keys.keys == (second,)
    await late.close()


async def test_metrics_are_collected_and_a_silent_worker_is_not_waited_for(office: Open) -> None:
    at = await office()
    worker = await at.worker(4)
    worker.families = [MetricFamily("x", "counter", "Things.", [("x_total", {"of": "a"}, 2.0)])]
    await at.desk.collect(10.0)
    assert at.samples == [(4, worker.families)]
    worker.client._transport.pause_reading()
    await at.desk.collect(0.05)
    assert len(at.samples) == 1


async def test_a_worker_that_answers_nothing_is_told_of(office: Open) -> None:
    at = await office()
    lively, stuck = await at.worker(1), await at.worker(2)
    silent: list[int] = []
    at.desk.on_silent = lambda worker, pid: silent.append(worker)
    collecting = asyncio.create_task(at.desk.collect_forever(0.02, silent_after_s=0.5))
    await until(lambda: len(at.samples) >= 10)
    assert silent == []
    assert stuck.client._transport is not None
    stuck.client._transport.pause_reading()
    await until(lambda: bool(silent))
    assert set(silent) == {2} and await lively.placed()
    stuck.client._transport.resume_reading()
    told = len([worker for worker, _ in at.samples if worker == 2])
    await until(lambda: len([worker for worker, _ in at.samples if worker == 2]) > told)
    collecting.cancel()


@pytest.mark.parametrize(
    "noise",
    [
        b"\x00\x00\x00\x00",
        b"\xff" * 8,
        frame(b"\xc1"),
        frame(b"GET / HTTP/1.1\r\n\r\n"),
    ],
)
async def test_what_cannot_be_read_ends_only_its_connection(office: Open, noise: bytes) -> None:
    at = await office()
    worker = await at.worker(0)
    reader, writer = await asyncio.open_unix_connection(str(at.path))
    writer.write(frame(encode(Hello(1, 1))))
    frames = FrameReader()
    assert isinstance(from_conductor(frames.feed(await reader.read(1 << 16))[0]), Welcome)
    writer.write(noise)
    assert await reader.read() == b""
    writer.close()
    assert await worker.placed()


async def test_only_this_user_can_reach_the_socket(office: Open) -> None:
    at = await office()
    assert at.path.stat().st_mode & 0o777 == 0o600
    at.desk.close()
    assert not at.path.exists()
    with socket.socket(socket.AF_UNIX) as probe, pytest.raises(OSError):
        probe.connect(str(at.path))
