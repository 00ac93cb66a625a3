"""The lease is held by one replica at a time, whatever the store and the network do."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from redis_process import RedisProcess, needs_redis, redis_process

from conductor.shared_state import scripts
from conductor.shared_state.lease import Answer, Lease, Question
from conductor.shared_state.link import LinkError, RedisLink

LEASE_S = 3.0


@dataclass
class Store:
    """What the script does in Redis, on a clock of the test's."""

    server: int = 0  # another one, or one that lost its data, has another number
    known: int = -1
    quiet_s: float = 0.0
    lease: tuple[int, str] | None = None
    until_s: float = 0.0
    highest: int = 0

    def lose_everything(self) -> None:
        self.server, self.known, self.lease, self.highest = self.server + 1, -1, None, 0

    def fail_over(self, older: tuple[tuple[int, str] | None, float, int]) -> None:
        """Another server takes over, which has not heard the latest."""
        self.server += 1
        self.lease, self.until_s, self.highest = older

    def take(self, replica: str, question: Question, now_s: float) -> Answer:
        if self.known != self.server:
            self.known, self.quiet_s = self.server, now_s + LEASE_S
        if self.lease is not None and now_s >= self.until_s:
            self.lease = None
        held, holder = self.lease or (0, "")
        granted = 0
        if question.token:
            restores = now_s < self.quiet_s and question.token > held and question.token >= self.highest
            if (held, holder) == (question.token, replica) or restores:
                granted = question.token
        elif self.lease is None and now_s >= self.quiet_s:
            granted = max(self.highest + 1, question.floor + 1, int(now_s * 1e3))
        if granted:
            self.lease, self.until_s = (granted, replica), now_s + LEASE_S
            self.highest, holder = max(self.highest, granted), replica
        return Answer(granted, holder, self.highest)


@dataclass
class Call:
    replica: str
    question: Question
    asked_s: float
    arrives_s: float
    back_s: float
    answer: Answer | None = None


@dataclass
class World:
    """Three replicas, a store, and messages that take their time or get lost."""

    store: Store = field(default_factory=Store)
    now_s: float = 1000.0
    calls: list[Call] = field(default_factory=list)
    older: tuple[tuple[int, str] | None, float, int] = (None, 0.0, 0)
    granted: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.leases = {name: Lease(LEASE_S) for name in "abc"}

    def ask(self, name: str, there_s: float, back_s: float) -> None:
        question = self.leases[name].question(self.now_s)
        arrives_s = self.now_s + there_s
        self.calls.append(Call(name, question, self.now_s, arrives_s, arrives_s + back_s))

    def run_to(self, end_s: float) -> None:
        while True:
            due = [(c.arrives_s if c.answer is None else c.back_s, n) for n, c in enumerate(self.calls)]
            if not due or min(due)[0] > end_s:
                break
            self.now_s, number = min(due)
            call = self.calls[number]
            if call.answer is None:
                call.answer = self.store.take(call.replica, call.question, self.now_s)
                if call.answer.token:
                    assert self.granted.setdefault(call.answer.token, call.replica) == call.replica
            else:
                del self.calls[number]
                self.leases[call.replica].answered(call.question, call.asked_s, call.answer)
            self.check()
        self.now_s = end_s
        self.check()

    def check(self) -> None:
        holders = [name for name, lease in self.leases.items() if lease.token(self.now_s)]
        assert len(holders) <= 1, f"held by {holders} at once"


DELAYS_S = st.sampled_from([0.001, 0.05, 0.5, 2.0])
EVENTS = st.sampled_from(["nothing", "nothing", "nothing", "flush", "remember", "fail over", "restart"])
# Who asks in this step if it is due, how long the way there and back takes, what happens, and how long to wait.
steps = st.lists(
    st.tuples(
        st.sets(st.sampled_from("abc"), min_size=1),
        DELAYS_S,
        DELAYS_S,
        EVENTS,
        st.sampled_from([0.2, 0.9, 2.8, 3.1]),
    ),
    min_size=5,
    max_size=50,
)


@settings(max_examples=200, deadline=None)
@given(steps)
def test_never_two_holders(plan: list[tuple[set[str], float, float, str, float]]) -> None:
    world = World()
    for awake, there_s, back_s, event, wait_s in plan:
        for name in sorted(awake):
            asks = any(call.replica == name for call in world.calls)
            if not asks and world.leases[name].is_due(world.now_s):
                world.ask(name, there_s, back_s)
        # The store's own guard lasts as long as a lease: it cannot lose its data twice within one.
        guarded = world.store.known == world.store.server and world.now_s >= world.store.quiet_s
        if event == "flush" and guarded:
            world.store.lose_everything()
        elif event == "fail over" and guarded:
            world.store.fail_over(world.older)
        elif event == "remember":
            world.older = (world.store.lease, world.store.until_s, world.store.highest)
        elif event == "restart":
            name = min(awake)
            world.calls = [call for call in world.calls if call.replica != name]
            world.leases[name] = Lease(LEASE_S)
        world.run_to(world.now_s + wait_s)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0.1, 2.0)), min_size=20, max_size=60))
def test_tokens_grow_with_every_new_holder(turns: list[tuple[str, float]]) -> None:
    world = World()
    for name, seconds in turns:
        world.ask(name, 0.01, 0.01)
        world.run_to(world.now_s + seconds)
    order = list(world.granted)
    assert order == sorted(order)


def test_a_lost_store_leaves_the_lease_to_its_holder() -> None:
    world = World()
    world.run_to(1000.1)
    world.ask("a", 0.01, 0.01)
    world.run_to(world.now_s + LEASE_S + 0.5)  # the first answer only begins the quiet time
    world.ask("a", 0.01, 0.01)
    world.run_to(world.now_s + 0.5)
    token = world.leases["a"].token(world.now_s)
    assert token
    world.store.lose_everything()
    world.ask("b", 0.01, 0.01)
    world.ask("a", 0.02, 0.01)
    world.run_to(world.now_s + 0.5)
    assert world.leases["a"].token(world.now_s) == token
    assert not world.leases["b"].token(world.now_s)
    assert world.store.highest == token


async def _contend(server: RedisProcess, name: str, spans: list, stop: asyncio.Event, lease_s: float) -> None:
    """Take and hold the lease, now and then standing still; ``spans`` gets [from, until, token] of every hold."""
    link = RedisLink(server.url, "t", 0.2)
    lease, random_ = Lease(lease_s), random.Random(name)
    try:
        while not stop.is_set():
            asked_s = time.monotonic()
            question = lease.question(asked_s)
            try:
                granted, leader, highest = await link.run(
                    scripts.TAKE_LEASE, ("lease", "token", "server"), name, question.token, question.floor,
                    round(lease_s * 1e3),
                )  # fmt: skip
            except LinkError:
                lease.unanswered()
            else:
                lease.answered(question, asked_s, Answer(int(granted), leader.decode(), int(highest)))
            token = lease.token(time.monotonic())
            if token:
                spans.append([name, time.monotonic(), lease._until_s, token])
            pause_s = lease_s / 3 if random_.random() < 0.8 else 1.5 * lease_s
            await asyncio.sleep(pause_s * random_.uniform(0.5, 1.0))
    finally:
        await link.close()


@pytest.mark.slow
@needs_redis
async def test_real_redis_flushed_paused_and_restarted(tmp_path: Path) -> None:
    lease_s = 1.0
    with redis_process(tmp_path) as server:
        spans: list[list] = []
        stop = asyncio.Event()
        tasks = [asyncio.create_task(_contend(server, name, spans, stop, lease_s)) for name in "abc"]
        await asyncio.sleep(2.5)
        await asyncio.to_thread(server.flush)
        await asyncio.sleep(2.5)
        server.pause()
        await asyncio.sleep(1.5)
        server.resume()
        await asyncio.sleep(2.5)
        server.kill()
        await asyncio.to_thread(server.start)
        await asyncio.sleep(3.0)
        stop.set()
        await asyncio.gather(*tasks)
    holds: dict[int, list[float]] = {}
    owner: dict[int, str] = {}
    for name, from_s, until_s, token in spans:
        assert owner.setdefault(token, name) == name
        hold = holds.setdefault(token, [from_s, until_s])
        hold[1] = max(hold[1], until_s)
    assert len(holds) >= 3, "the lease hardly changed hands"
    ordered = [holds[token] for token in sorted(holds)]
    for earlier, later in itertools.pairwise(ordered):
        assert earlier[1] <= later[0], "two held it at one moment"


@pytest.mark.parametrize("field", ["token", "leader"])
def test_no_answer_is_no_news(field: str) -> None:
    lease = Lease(LEASE_S)
    question = lease.question(0.0)
    lease.answered(question, 0.0, Answer(7, "a", 7))
    lease.question(1.0)
    lease.unanswered()
    assert lease.is_due(1.0)
    assert {"token": lease.token(2.0), "leader": lease.leader}[field] == {"token": 7, "leader": "a"}[field]
    assert lease.token(LEASE_S) == 0
