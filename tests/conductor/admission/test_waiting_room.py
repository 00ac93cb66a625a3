from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from conductor.admission import WaitingRoom


def fill(
    room: WaitingRoom, entries: list[tuple[str, float]], *, priority: int = 0
) -> dict[Any, tuple[str, float]]:
    known = {}
    for i, (tenant, cost) in enumerate(entries):
        assert room.add(i, tenant, priority, cost, arrived_s=float(i)) is None
        known[i] = (tenant, cost)
    return known


def drain(room: WaitingRoom, now_s: float = 0.0) -> list[Any]:
    order = []
    while (key := room.pop(now_s)) is not None:
        order.append(key)
    return order


# ---- order ----


def test_priorities_are_strict() -> None:
    room = WaitingRoom(10)
    for key, priority in (("low", -1), ("normal", 0), ("high", 5), ("high too", 5)):
        room.add(key, "t", priority, 1.0, 0.0)
    assert room.waiting_by_priority() == {5: 2, 0: 1, -1: 1}
    assert drain(room) == ["high", "high too", "normal", "low"]


def test_a_tenant_goes_by_deadline_and_by_arrival_without_one() -> None:
    room = WaitingRoom(10)
    room.add("none", "t", 0, 1.0, 0.0)
    room.add("late", "t", 0, 1.0, 1.0, 90.0)
    room.add("soon", "t", 0, 9.0, 2.0, 30.0)
    room.add("none either", "t", 0, 1.0, 3.0)
    assert drain(room, 4.0) == ["soon", "late", "none", "none either"]


def test_shortest_first_with_ageing() -> None:
    entries = [("long", 10.0, 0.0), ("short", 1.0, 5.0), ("middle", 4.0, 6.0)]
    orders = {}
    for ageing in (0.0, 1.0, 100.0):
        room = WaitingRoom(10, ageing=ageing)
        for key, cost, arrived_s in entries:
            room.add(key, "t", 0, cost, arrived_s)
        orders[ageing] = drain(room, 7.0)
    assert orders[0.0] == ["short", "middle", "long"]
    assert orders[1.0] == ["short", "long", "middle"]  # 1+5, 10+0 before 4+6 by arrival
    assert orders[100.0] == ["long", "short", "middle"]


def test_with_ageing_a_long_request_is_not_overtaken_for_ever() -> None:
    room = WaitingRoom(100, ageing=0.5)
    room.add("long", "t", 0, 20.0, 0.0)
    for second in range(200):
        room.add(second, "t", 0, 1.0, float(second))
        if room.pop(float(second)) == "long":
            break
    assert 37 <= second <= 40  # 20 + 0 = 1 + 0.5 * 38


# ---- fairness ----

costs = st.integers(1, 20).map(float)


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from("abcde"), st.sampled_from([0.5, 1.0, 2.0, 3.0, 7.0]), min_size=2, max_size=5
    ),
    st.lists(costs, min_size=50, max_size=120),
    st.sampled_from([None, 0.0, 1.0]),
)
def test_shares_over_a_backlog_stay_within_one_request_of_the_weights(
    weights: dict[str, float], drawn: list[float], ageing: float | None
) -> None:
    room = WaitingRoom(10_000, weights=weights, ageing=ageing)
    entries = [(tenant, cost) for cost in drawn for tenant in sorted(weights)]
    known = fill(room, entries)
    waiting = Counter(tenant for tenant, _ in entries)
    served: dict[str, float] = dict.fromkeys(weights, 0.0)
    largest = max(drawn)
    while True:
        tenant, cost = known[room.pop(0.0)]
        served[tenant] += cost
        waiting[tenant] -= 1
        if not waiting[tenant]:
            break
        for a in weights:
            for b in weights:
                apart = abs(served[a] / weights[a] - served[b] / weights[b])
                assert apart <= largest / min(weights[a], weights[b]) + 1e-9


def test_a_tenant_gets_no_credit_for_having_been_away() -> None:
    room = WaitingRoom(1000)
    for i in range(100):
        room.add(f"a{i}", "a", 0, 1.0, 0.0)
    for _ in range(60):
        room.pop(0.0)
    for i in range(40):
        room.add(f"b{i}", "b", 0, 1.0, 0.0)
    first = [room.pop(0.0) for _ in range(20)]
    assert sum(str(key).startswith("a") for key in first) == 10


def test_leaving_and_coming_back_does_not_clear_the_account() -> None:
    room = WaitingRoom(1000)
    for i in range(50):
        room.add(f"b{i}", "b", 0, 1.0, 0.0)
    served: Counter[str] = Counter()
    for i in range(40):
        if "a" not in room.waiting_by_tenant():
            room.add(f"a{i}", "a", 0, 5.0, 0.0)
        key = str(room.pop(0.0))
        served[key[0]] += 5 if key[0] == "a" else 1
        assert abs(served["a"] - served["b"]) <= 5


def test_a_stream_of_new_tenants_does_not_starve_a_known_one() -> None:
    room = WaitingRoom(1000)
    room.add("known 0", "known", 0, 1.0, 0.0)
    room.add("known 1", "known", 0, 1.0, 0.0)
    for i in range(10):
        room.add(f"old {i}", f"old {i}", 0, 1.0, 0.0)
    left = 2
    for i in range(60):
        room.add(f"new {i}", f"new {i}", 0, 1.0, 0.0)
        left -= str(room.pop(0.0)).startswith("known")
    assert left == 0


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abc"), costs), min_size=1, max_size=60), st.data())
def test_everybody_is_served_in_the_end(entries: list[tuple[str, float]], data: st.DataObject) -> None:
    """One arrival a departure, for ever: whoever waits at the start has been served after a bounded time."""
    room = WaitingRoom(1000, weights={"a": 4.0}, ageing=1.0)
    start = set(fill(room, entries))
    now_s, number = float(len(entries)), len(entries)
    for _ in range(4000):
        now_s += 1.0
        tenant, cost = data.draw(st.tuples(st.sampled_from("abc"), costs)) if number < 150 else ("a", 1.0)
        room.add(number, tenant, 0, cost, now_s)
        number += 1
        start.discard(room.pop(now_s))
        if not start:
            return
    raise AssertionError(f"{start} still wait")


# ---- a full room ----


def test_a_full_room_says_how_long_it_is_and_when_to_come_back() -> None:
    room = WaitingRoom(20)
    for i in range(25):
        room.add(i, "t", 0, 1.0, 0.0)
        if i >= 15:
            room.pop(i * 0.5)
    for i in range(30, 60):
        rejection = room.add(i, "t", 0, 1.0, 20.0)
    assert rejection is not None
    assert rejection.key == 59
    assert rejection.stage == "queue"
    assert rejection.load == 1.0
    assert "20 requests are waiting" in rejection.reason
    assert rejection.retry_after_s == pytest.approx(10.0)  # twenty, one every half second


def test_a_higher_priority_pushes_out_the_lowest() -> None:
    room = WaitingRoom(3)
    room.add("low, late", "t", -1, 1.0, 0.0, 50.0)
    room.add("low, soon", "t", -1, 1.0, 0.0, 20.0)
    room.add("normal", "t", 0, 1.0, 0.0)
    rejection = room.add("high", "t", 1, 1.0, 0.0)
    assert rejection is not None
    assert rejection.key == "low, late"
    refused = room.add("lower still", "t", -2, 1.0, 0.0)
    assert refused is not None
    assert refused.key == "lower still"
    assert drain(room) == ["high", "normal", "low, soon"]


def test_one_tenant_cannot_fill_the_room_against_the_others() -> None:
    room = WaitingRoom(10)
    for i in range(10):
        room.add(f"a{i}", "a", 0, 1.0, float(i))
    turned_away = []
    for i in range(10):
        rejection = room.add(f"b{i}", "b", 0, 1.0, 20.0 + i)
        assert rejection is not None
        turned_away.append(rejection.key)
    assert turned_away[:5] == ["a9", "a8", "a7", "a6", "a5"]
    assert turned_away[5:] == ["b5", "b6", "b7", "b8", "b9"]
    assert room.waiting_by_tenant() == {"a": 5, "b": 5}


def test_the_room_is_shared_by_weight() -> None:
    room = WaitingRoom(12, weights={"a": 3.0})
    for i in range(12):
        room.add(f"b{i}", "b", 0, 1.0, 0.0)
    for i in range(12):
        room.add(f"a{i}", "a", 0, 1.0, 0.0)
    assert room.waiting_by_tenant() == {"a": 9, "b": 3}


# ---- deadlines, push back, removal ----


def test_a_deadline_is_never_missed_silently() -> None:
    room = WaitingRoom(10)
    room.add("a", "t", 0, 1.0, 0.0, 5.0)
    room.add("b", "t", 0, 1.0, 0.0, 3.0)
    room.add("c", "t", 0, 1.0, 0.0)
    assert room.next_deadline_s == 3.0
    assert room.pop(5.0) == "c"
    assert len(room) == 0
    assert room.next_deadline_s == 3.0  # overdue, not told yet
    assert room.expire(5.0) == ["b", "a"]
    assert room.expire(9.0) == []
    assert room.next_deadline_s is None


def test_what_is_pushed_back_has_its_turn_and_its_cost_back() -> None:
    room = WaitingRoom(2)
    room.add("a0", "a", 0, 8.0, 0.0)
    room.add("b0", "b", 0, 1.0, 0.0)
    assert room.pop(0.0) == "a0"
    room.add("b1", "b", 0, 1.0, 0.0)
    room.push_back("a0")  # although the room is full again
    assert len(room) == 3
    assert drain(room) == ["a0", "b0", "b1"]
    with pytest.raises(KeyError):
        room.push_back("never seen")


def test_a_client_that_left_is_neither_served_nor_told() -> None:
    room = WaitingRoom(4)
    for key in ("waiting", "overdue", "popped"):
        room.add(key, key, {"popped": 1}.get(key, 0), 1.0, 0.0, 2.0 if key == "overdue" else math.inf)
    assert room.pop(1.0) == "popped"
    assert room.remove("waiting")
    assert room.pop(3.0) is None
    assert room.remove("overdue")
    assert not room.remove("popped")
    assert not room.remove("unknown")
    assert room.expire(9.0) == []
    with pytest.raises(KeyError):
        room.push_back("popped")


@pytest.mark.parametrize(
    ("parameters", "says"),
    [
        ({"capacity": 0}, "capacity must be at least 1"),
        ({"capacity": 1, "weights": {"a": 0.0}}, "weight of tenant 'a' must be positive"),
        ({"capacity": 1, "ageing": -1.0}, "ageing must be"),
    ],
)
def test_rooms_that_make_no_sense_are_refused(parameters: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        WaitingRoom(**parameters)


@pytest.mark.parametrize(
    ("cost", "arrived_s", "deadline_s", "says"),
    [
        (0.0, 0.0, 1.0, "cost of 'k' must be positive"),
        (math.nan, 0.0, 1.0, "cost of 'k'"),
        (1.0, math.inf, 1.0, "must be times"),
        (1.0, 0.0, math.nan, "must be times"),
    ],
)
def test_requests_that_make_no_sense_are_refused(
    cost: float, arrived_s: float, deadline_s: float, says: str
) -> None:
    room = WaitingRoom(2)
    with pytest.raises(ValueError, match=says):
        room.add("k", "t", 0, cost, arrived_s, deadline_s)
    room.add("k", "t", 0, 1.0, 0.0)
    with pytest.raises(ValueError, match="waiting already"):
        room.add("k", "t", 0, 1.0, 0.0)


# ---- against an oracle ----


@dataclass
class Waiting:
    key: int
    tenant: str
    priority: int
    cost: float
    deadline_s: float
    rank: float


class Oracle:
    """The rules of the room, stated with lists and searches."""

    def __init__(self, capacity: int, weights: dict[str, float], ageing: float | None) -> None:
        self.capacity, self.weights, self.ageing = capacity, weights, ageing
        self.waiting: list[Waiting] = []
        self.overdue: list[Waiting] = []
        self.served: dict[int, dict[str, float]] = defaultdict(dict)
        self.turn: dict[tuple[int, str], int] = {}  # of tenants, who came first
        self.virtual: dict[int, float] = defaultdict(float)

    def weight(self, tenant: str) -> float:
        return self.weights.get(tenant, 1.0)

    def of(self, priority: int, tenant: str | None = None) -> list[Waiting]:
        there = [w for w in self.waiting if w.priority == priority and tenant in (None, w.tenant)]
        return sorted(there, key=lambda w: (w.rank, w.key))

    def enter(self, w: Waiting, refund: float = 0.0) -> None:
        accounts = self.served[w.priority]
        if self.of(w.priority, w.tenant):
            accounts[w.tenant] -= refund
        else:
            accounts[w.tenant] = max(accounts.get(w.tenant, 0.0), self.virtual[w.priority]) - refund
            self.turn[w.priority, w.tenant] = w.key
        self.waiting.append(w)

    def leave(self, w: Waiting) -> None:
        self.waiting.remove(w)
        if not self.of(w.priority):
            self.served.pop(w.priority, None)
            self.virtual.pop(w.priority, None)

    def backlog(self, priority: int, tenant: str) -> float:
        return sum(w.cost for w in self.of(priority, tenant)) / self.weight(tenant)

    def add(self, w: Waiting) -> int | None:
        if len(self.waiting) < self.capacity:
            self.enter(w)
            return None
        lowest = min(each.priority for each in self.waiting)
        if lowest > w.priority:
            return w.key
        tenants = {each.tenant for each in self.of(lowest)}
        longest = max(tenants, key=lambda t: (self.backlog(lowest, t), self.turn[lowest, t]))
        victim = self.of(lowest, longest)[-1]
        if lowest == w.priority:
            without = self.backlog(lowest, longest) - victim.cost / self.weight(longest)
            own = self.backlog(lowest, w.tenant) + w.cost / self.weight(w.tenant)
            if longest == w.tenant or without < own:
                return w.key
        self.leave(victim)
        self.enter(w)
        return victim.key

    def expire(self, now_s: float) -> None:
        for w in sorted(self.waiting, key=lambda w: (w.deadline_s, w.key)):
            if w.deadline_s <= now_s:
                self.leave(w)
                self.overdue.append(w)

    def pop(self, now_s: float) -> Waiting | None:
        self.expire(now_s)
        if not self.waiting:
            return None
        top = max(w.priority for w in self.waiting)
        tenants = {w.tenant for w in self.of(top)}
        accounts = self.served[top]
        tenant = min(tenants, key=lambda t: (accounts[t], self.turn[top, t]))
        w = self.of(top, tenant)[0]
        share = sum(self.weight(t) for t in tenants)
        accounts[tenant] += w.cost / self.weight(tenant)
        self.leave(w)
        left = {each.tenant for each in self.of(top)}
        if left:
            self.virtual[top] = max(self.virtual[top] + w.cost / share, min(accounts[t] for t in left))
        return w


class RoomMachine(RuleBasedStateMachine):
    """Weights and costs are powers of two, so that sums of them are exact and ties are ties in both."""

    @initialize(capacity=st.integers(1, 12), ageing=st.sampled_from([None, 0.0, 0.5]))
    def begin(self, capacity: int, ageing: float | None) -> None:
        weights = {"a": 2.0, "b": 0.5}
        self.room = WaitingRoom(capacity, weights=weights, ageing=ageing)
        self.oracle = Oracle(capacity, weights, ageing)
        self.now_s = 0.0
        self.keys = 0
        self.popped: dict[int, Waiting] = {}

    @rule(
        tenant=st.sampled_from("abc"),
        priority=st.sampled_from([0, 0, 0, 0, 1, -1]),
        cost=st.sampled_from([0.5, 1.0, 2.0, 4.0]),
        patience_s=st.none() | st.integers(0, 20),
    )
    def add(self, tenant: str, priority: int, cost: float, patience_s: int | None) -> None:
        self.keys += 1
        deadline_s = self.now_s + patience_s if patience_s is not None else math.inf
        ageing = self.oracle.ageing
        rank = deadline_s if ageing is None else cost + ageing * self.now_s
        away = self.oracle.add(Waiting(self.keys, tenant, priority, cost, deadline_s, rank))
        rejection = self.room.add(self.keys, tenant, priority, cost, self.now_s, deadline_s)
        assert (rejection.key if rejection is not None else None) == away

    @rule()
    def pop(self) -> None:
        expected = self.oracle.pop(self.now_s)
        assert self.room.pop(self.now_s) == (expected.key if expected is not None else None)
        if expected is not None:
            assert expected.deadline_s > self.now_s
            self.popped[expected.key] = expected
            if len(self.popped) > self.oracle.capacity:
                del self.popped[min(self.popped, key=list(self.popped).index)]

    @precondition(lambda self: self.popped)
    @rule(data=st.data())
    def push_back(self, data: st.DataObject) -> None:
        w = self.popped.pop(data.draw(st.sampled_from(sorted(self.popped))))
        self.oracle.enter(w, refund=w.cost / self.oracle.weight(w.tenant))
        self.room.push_back(w.key)

    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        known = self.oracle.waiting + self.oracle.overdue
        if not known:
            return
        w = data.draw(st.sampled_from(sorted(known, key=lambda w: w.key)))
        if w in self.oracle.waiting:
            self.oracle.leave(w)
        else:
            self.oracle.overdue.remove(w)
        assert self.room.remove(w.key)

    @rule()
    def expire(self) -> None:
        self.oracle.expire(self.now_s)
        assert self.room.expire(self.now_s) == [w.key for w in self.oracle.overdue]
        self.oracle.overdue.clear()

    @rule(seconds=st.integers(1, 8))
    def wait(self, seconds: int) -> None:
        self.now_s += seconds

    @invariant()
    def counts_agree(self) -> None:
        if not hasattr(self, "room"):
            return
        assert len(self.room) == len(self.oracle.waiting)
        assert all(w.key in self.room for w in self.oracle.waiting)
        assert self.room.waiting_by_tenant() == Counter(w.tenant for w in self.oracle.waiting)
        assert self.room.waiting_by_priority() == Counter(w.priority for w in self.oracle.waiting)
        deadlines = [w.deadline_s for w in self.oracle.overdue or self.oracle.waiting]
        finite = [d for d in deadlines if d < math.inf]
        assert self.room.next_deadline_s == (min(finite) if finite else None)


TestRoomMachine = RoomMachine.TestCase
TestRoomMachine.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
