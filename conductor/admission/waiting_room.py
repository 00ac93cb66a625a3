"""Requests held at the router until a rank is about to run dry (late binding), and who of them goes next.

Priorities are strict. Within one, tenants share by weight: whoever has had the least predicted cost per unit of
weight goes next, which is deficit round robin with an infinitely small quantum (the counters of VTC, arXiv
2401.00588, the deficits of DLPM, arXiv 2501.14312), so that two waiting tenants never drift apart by more than
one request. A tenant that comes (back) starts at the virtual time of WF2Q+ (Bennett and Zhang, 1996): it gets
no credit for the time it was away, and an endless stream of new tenants cannot keep a known one waiting.
Within a tenant the order is by deadline, or by cost with ageing.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import Counter, OrderedDict
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

from conductor.admission.prospect import MAX_RETRY_S, MIN_RETRY_S, Rejection

# How much the last gap between two departures counts in their mean, from which Retry-After is told.
_GAP_WEIGHT = 0.1


@dataclass(frozen=True, slots=True)
class _Entry:
    key: Hashable
    tenant: str
    priority: int
    cost: float
    deadline_s: float
    rank: float  # lower goes first within the tenant
    number: int  # of its arrival, which breaks ties


@dataclass(slots=True)
class _Tenant:
    """The requests of one tenant that wait in one class, and the cost per weight that it has had."""

    served: float
    weight: float
    number: int  # of its arrival in the class, which breaks ties
    waiting: list[tuple[float, int, _Entry]] = field(default_factory=list)  # sorted
    waiting_cost: float = 0.0

    @property
    def backlog(self) -> float:
        return self.waiting_cost / self.weight


class _Class:
    """The requests of one priority."""

    def __init__(self) -> None:
        self.tenants: dict[str, _Tenant] = {}  # those with waiting requests
        self.length = 0
        self._turns: list[tuple[float, int, str]] = []  # sorted: (served, number, tenant)
        self._virtual_time = 0.0
        self._weight = 0.0  # of the tenants that wait
        self._away: dict[str, float] = {}  # ``served`` of tenants that had more than the virtual time

    def add(self, entry: _Entry, weight: float, refund: float = 0.0) -> None:
        tenant = self.tenants.get(entry.tenant)
        if tenant is None:
            served = max(self._away.pop(entry.tenant, 0.0) - refund, self._virtual_time - refund)
            tenant = self.tenants[entry.tenant] = _Tenant(served, weight, entry.number)
            self._weight += weight
            insort(self._turns, (served, tenant.number, entry.tenant))
        elif refund:
            self._serve(entry.tenant, tenant, -refund)
        insort(tenant.waiting, (entry.rank, entry.number, entry))
        tenant.waiting_cost += entry.cost
        self.length += 1

    def pop(self) -> _Entry:
        """The next one; its tenant pays for it."""
        name = self._turns[0][2]
        tenant = self.tenants[name]
        entry = tenant.waiting[0][2]
        share = self._weight
        self._serve(name, tenant, entry.cost / tenant.weight)
        self.take(entry)
        if self._turns:
            self._virtual_time = max(self._virtual_time + entry.cost / share, self._turns[0][0])
        return entry

    def take(self, entry: _Entry) -> None:
        """Take one out that waits; whether it was served is not decided here."""
        tenant = self.tenants[entry.tenant]
        del tenant.waiting[bisect_left(tenant.waiting, (entry.rank, entry.number))]
        tenant.waiting_cost -= entry.cost
        self.length -= 1
        if tenant.waiting:
            return
        del self._turns[bisect_left(self._turns, (tenant.served, tenant.number))]
        del self.tenants[entry.tenant]
        self._weight -= tenant.weight
        self._away[entry.tenant] = tenant.served
        if len(self._away) > 64 + 2 * self.length:
            self._forget()

    def last_of(self, name: str) -> _Entry:
        return self.tenants[name].waiting[-1][2]

    def _serve(self, name: str, tenant: _Tenant, share: float) -> None:
        del self._turns[bisect_left(self._turns, (tenant.served, tenant.number))]
        tenant.served += share
        insort(self._turns, (tenant.served, tenant.number, name))

    def _forget(self) -> None:
        """Who has had no more than the virtual time would start there anyway."""
        ahead = sorted((served, name) for name, served in self._away.items() if served > self._virtual_time)
        self._away = {name: served for served, name in ahead[-(64 + self.length) :]}


class WaitingRoom:
    """A bounded room. Costs are predicted work in any one unit, such as seconds of prefill.

    ``weights`` are tenants' shares, 1 for those not named. ``ageing`` None orders each tenant's requests by
    deadline; a number orders them by cost, every second waited counting as that much less cost: 0 is strictly
    shortest first, a large one is first come, first served. Times are seconds of one monotonic clock.
    """

    def __init__(
        self, capacity: int, *, weights: Mapping[str, float] | None = None, ageing: float | None = None
    ) -> None:
        """Raises ValueError for parameters out of bounds."""
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1 request, not {capacity}")
        self._weights = dict(weights or {})
        for tenant, weight in self._weights.items():
            if not (math.isfinite(weight) and weight > 0):
                raise ValueError(f"the weight of tenant {tenant!r} must be positive, not {weight!r}")
        if ageing is not None and not (math.isfinite(ageing) and ageing >= 0):
            raise ValueError(f"ageing must be a cost per second of at least 0, not {ageing!r}")
        self.capacity = capacity
        self.ageing = ageing
        self._classes: dict[int, _Class] = {}
        self._priorities: list[int] = []  # of the classes that hold someone, ascending
        self._entries: dict[Hashable, _Entry] = {}
        self._deadlines: list[tuple[float, int, _Entry]] = []  # sorted
        self._overdue: dict[Hashable, _Entry] = {}  # not told yet
        self._popped: OrderedDict[Hashable, _Entry] = OrderedDict()  # the last ones, which may be pushed back
        self._numbers = 0
        self._counts: Counter[str] = Counter()
        self._gap_s = 0.0  # mean time between departures while someone waits; 0 before the first
        self._popped_s: float | None = None  # the last departure that left someone behind

    def __len__(self) -> int:
        """Requests waiting."""
        return len(self._entries)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._entries

    def waiting_by_tenant(self) -> dict[str, int]:
        """Requests waiting of every tenant that has any."""
        return dict(self._counts)

    def waiting_by_priority(self) -> dict[int, int]:
        """Requests waiting of every priority that has any."""
        return {priority: self._classes[priority].length for priority in reversed(self._priorities)}

    @property
    def next_deadline_s(self) -> float | None:
        """When `expire` will have something to tell; None when nobody waits for a deadline."""
        if self._overdue:
            return min(entry.deadline_s for entry in self._overdue.values())
        if not self._deadlines or self._deadlines[0][0] == math.inf:
            return None
        return self._deadlines[0][0]

    def add(
        self,
        key: Hashable,
        tenant: str,
        priority: int,
        cost: float,
        arrived_s: float,
        deadline_s: float = math.inf,
    ) -> Rejection | None:
        """Let a request wait. A rejection names by its ``key`` who is turned away: this one, or another.

        When the room is full, someone of the lowest priority goes if that is lower than this one's; of the same
        priority, the last in line of the tenant with the most waiting work per weight, if that stays more than
        this tenant's. So no tenant can fill the room against the others. Raises ValueError for a key that
        waits already or expired untold, and for a cost or deadline that is no number.
        """
        if key in self._entries or key in self._overdue:
            raise ValueError(f"the key {key!r} is waiting already; keys must be unique")
        if not (math.isfinite(cost) and cost > 0):
            raise ValueError(f"the cost of {key!r} must be positive and finite, not {cost!r}")
        if math.isnan(deadline_s) or not math.isfinite(arrived_s):
            raise ValueError(f"arrival {arrived_s!r} and deadline {deadline_s!r} of {key!r} must be times")
        self._popped.pop(key, None)
        self._numbers += 1
        rank = deadline_s if self.ageing is None else cost + self.ageing * arrived_s
        entry = _Entry(key, tenant, priority, cost, deadline_s, rank, self._numbers)
        if len(self._entries) < self.capacity:
            self._insert(entry)
            return None
        victim = self._victim(entry)
        rejection = self._full(victim or entry)
        if victim is not None:
            self._take(victim)
            self._insert(entry)
        return rejection

    def pop(self, now_s: float) -> Hashable | None:
        """The next request to be placed, within its deadline; None when nobody waits."""
        self._collect_overdue(now_s)
        if not self._priorities:
            self._popped_s = None
            return None
        entry = self._classes[self._priorities[-1]].pop()
        self._leave(entry)
        self._popped[entry.key] = entry
        while len(self._popped) > self.capacity:
            self._popped.popitem(last=False)
        self._learn_gap(now_s)
        return entry.key

    def push_back(self, key: Hashable) -> None:
        """Undo `pop` for one that could not be placed after all: it has its turn and its cost back.

        It is taken in even if the room has filled up meanwhile. Raises KeyError for a key that was not among
        the last ``capacity`` popped, or was added again since.
        """
        entry = self._popped.pop(key)
        self._insert(entry, refund=True)

    def remove(self, key: Hashable) -> bool:
        """The client left; whether it was waiting."""
        self._popped.pop(key, None)
        if self._overdue.pop(key, None) is not None:
            return True
        entry = self._entries.get(key)
        if entry is None:
            return False
        self._take(entry)
        return True

    def expire(self, now_s: float) -> list[Hashable]:
        """Take out everyone whose deadline has come, earliest first; each is told once."""
        self._collect_overdue(now_s)
        expired = list(self._overdue)
        self._overdue.clear()
        return expired

    def _collect_overdue(self, now_s: float) -> None:
        while self._deadlines and self._deadlines[0][0] <= now_s:
            entry = self._deadlines[0][2]
            self._take(entry)
            self._overdue[entry.key] = entry

    def _victim(self, entry: _Entry) -> _Entry | None:
        """Who makes room for ``entry``; None when it is the one to go."""
        lowest = self._priorities[0]
        if lowest > entry.priority:
            return None
        room = self._classes[lowest]
        name = max(
            room.tenants, key=lambda tenant: (room.tenants[tenant].backlog, room.tenants[tenant].number)
        )
        victim = room.last_of(name)
        if lowest < entry.priority:
            return victim
        longest, own = room.tenants[name], room.tenants.get(entry.tenant)
        weight = self._weight(entry.tenant)
        backlog = (own.waiting_cost if own is not None else 0.0) + entry.cost
        fairer = (longest.waiting_cost - victim.cost) / longest.weight >= backlog / weight
        return victim if name != entry.tenant and fairer else None

    def _insert(self, entry: _Entry, *, refund: bool = False) -> None:
        waiting = self._classes.get(entry.priority)
        if waiting is None:
            waiting = self._classes[entry.priority] = _Class()
            insort(self._priorities, entry.priority)
        weight = self._weight(entry.tenant)
        waiting.add(entry, weight, entry.cost / weight if refund else 0.0)
        self._entries[entry.key] = entry
        insort(self._deadlines, (entry.deadline_s, entry.number, entry))
        self._counts[entry.tenant] += 1

    def _take(self, entry: _Entry) -> None:
        self._classes[entry.priority].take(entry)
        self._leave(entry)

    def _leave(self, entry: _Entry) -> None:
        del self._entries[entry.key]
        del self._deadlines[bisect_left(self._deadlines, (entry.deadline_s, entry.number))]
        self._counts[entry.tenant] -= 1
        if not self._counts[entry.tenant]:
            del self._counts[entry.tenant]
        if not self._classes[entry.priority].length:
            # Nobody of this priority waits, so everybody has had what they asked for: accounts are closed.
            del self._classes[entry.priority]
            self._priorities.remove(entry.priority)

    def _weight(self, tenant: str) -> float:
        return self._weights.get(tenant, 1.0)

    def _learn_gap(self, now_s: float) -> None:
        if self._popped_s is not None:
            gap_s = max(now_s - self._popped_s, 0.0)
            self._gap_s += _GAP_WEIGHT * (gap_s - self._gap_s) if self._gap_s else gap_s
        self._popped_s = now_s if self._entries else None

    def _full(self, turned_away: _Entry) -> Rejection:
        length = len(self._entries)
        wait_s = min(max(length * self._gap_s, MIN_RETRY_S), MAX_RETRY_S)
        reason = f"{length} requests are waiting, as many as the queue takes"
        return Rejection(reason, "queue", wait_s, length / self.capacity, turned_away.key)
