"""The ledger of tier actions: what is planned, running and ended. A state machine without I/O; time is an argument.

``submit`` puts an action in; ``advance`` says which to start and which to stop; whoever carries them out reports
with ``completed`` or ``failed``. An action waits while a link's budget or the target's free capacity has no room
for it, and is abandoned at its deadline.
"""

from __future__ import annotations

from bisect import insort
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import islice
from typing import NamedTuple

from conductor.actions import ActionKind, Place, TierAction
from conductor.link_budgets import Link, LinkBudgets, links_of

_FILLING = (ActionKind.REPLICATE, ActionKind.MOVE, ActionKind.PROMOTE, ActionKind.PREFETCH, ActionKind.DEMOTE)
SETTLE_S = 2.0  # until what was moved shows in the reported free capacity


class ActionState(StrEnum):
    PLANNED = "planned"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    ABANDONED = "abandoned"  # its deadline came first, or it was not taken in
    CANCELLED = "cancelled"

    @property
    def ended(self) -> bool:
        return self not in (ActionState.PLANNED, ActionState.RUNNING)


@dataclass(slots=True, eq=False)
class ActionRecord:
    """One action and what became of it. ``detail`` says why it waits or how it ended."""

    action: TierAction
    submitted_s: float
    ordered: bool  # by a person: these go first
    links: tuple[Link, ...]  # that its bytes pass
    state: ActionState = ActionState.PLANNED
    executor: str | None = None
    attempts: int = 0
    not_before_s: float = 0.0
    started_s: float | None = None  # of the last attempt
    ended_s: float | None = None
    blocks_done: int = 0
    detail: str = ""

    @property
    def partial(self) -> bool:
        """Done, but the source had lost some of the blocks."""
        return self.state is ActionState.DONE and self.blocks_done < self.action.blocks

    @property
    def moved_bytes(self) -> int:
        if self.state is not ActionState.DONE or not self.links:
            return 0
        return self.action.kv_bytes * self.blocks_done // max(self.action.blocks, 1)


@dataclass(slots=True)
class Tally:
    """Sums over the actions of one kind, executor and outcome that have ended."""

    actions: int = 0
    blocks: int = 0
    moved_bytes: int = 0
    seconds: float = 0.0
    benefit_s: float = 0.0


class TallyKey(NamedTuple):
    kind: ActionKind
    executor: str
    outcome: ActionState


class Orders(NamedTuple):
    """What to do now: actions to start, and ids of running ones to stop."""

    start: list[TierAction]
    stop: list[str]


@dataclass(frozen=True, slots=True)
class LedgerLimits:
    """``timeout_s`` is that of one attempt; retries wait ``backoff_s``, twice as long each time."""

    timeout_s: float = 60.0
    backoff_s: float = 0.5
    max_backoff_s: float = 10.0
    max_waiting: int = 1_000
    max_running: int = 64
    history: int = 10_000


@dataclass(slots=True)
class _Round:
    """What is known of the present moment while actions are started."""

    now_s: float
    congested: dict[
        Link, str
    ]  # what better actions wait for is not taken by lesser ones; with the words for it
    free_bytes: dict[Place, float | None]  # less what is on its way


@dataclass(slots=True)
class ActionLedger:
    """All actions under way, and the latest that have ended.

    ``free_bytes`` tells how much a place has room for, None where that is not known. Belongs to one thread.
    """

    budgets: LinkBudgets = field(default_factory=LinkBudgets)
    limits: LedgerLimits = LedgerLimits()
    free_bytes: Callable[[Place], float | None] = lambda place: None
    tallies: dict[TallyKey, Tally] = field(default_factory=dict, init=False)
    changed: Callable[[], None] = field(default=lambda: None, init=False)  # there may be orders
    _planned: dict[str, ActionRecord] = field(default_factory=dict, init=False)
    _queue: list[ActionRecord] = field(default_factory=list, init=False)  # the same, best first
    _running: dict[str, ActionRecord] = field(default_factory=dict, init=False)
    _ended: OrderedDict[str, ActionRecord] = field(default_factory=OrderedDict, init=False)
    _stop: list[str] = field(default_factory=list, init=False)
    _settling: list[tuple[float, Place, int]] = field(default_factory=list, init=False)

    def submit(self, action: TierAction, now_s: float, *, ordered: bool = False) -> ActionRecord:
        """Take an action in. One that can never run has ended in the record that comes back, which says why.

        ``ordered`` ones go before all others. Raises ValueError for an id that is known.
        """
        if self.find(action.action_id) is not None:
            raise ValueError(f"the action id {action.action_id!r} is used twice; ids must be unique")
        record = ActionRecord(action, now_s, ordered, links_of(action))
        self._plan(record)
        never = self.budgets.never(action)
        if never is not None:
            self._end(record, ActionState.FAILED, f"{never}; raise its budget or move less", now_s)
        elif action.deadline_s <= now_s:
            self._end(record, ActionState.ABANDONED, "its deadline had passed when it came", now_s)
        elif len(self._planned) > self.limits.max_waiting:
            self._end(record, ActionState.ABANDONED, f"{self.limits.max_waiting} actions wait already", now_s)
        else:
            self.changed()
        return record

    def advance(self, now_s: float) -> Orders:
        """What to start and to stop at this time. Those to start count as running from now on."""
        self._expire(now_s)
        start: list[TierAction] = []
        moment = _Round(now_s, {}, {})
        for record in list(self._queue):
            if len(self._running) >= self.limits.max_running:
                break
            if now_s < record.not_before_s:
                continue
            waits_for = self._waits_for(record, moment)
            if waits_for is None:
                self._start(record, moment)
                start.append(record.action)
            else:
                record.detail = waits_for
        stop, self._stop = self._stop, []
        return Orders(start, stop)

    def assigned(self, action_id: str, executor: str) -> None:
        """Who carries a running action out."""
        record = self._running.get(action_id)
        if record is not None:
            record.executor = executor

    def completed(self, action_id: str, blocks: int, now_s: float) -> None:
        """``blocks`` of its range are at the target now. An action that was stopped meanwhile stays as it is."""
        record = self._running.get(action_id)
        if record is None:
            return
        action, wanted = record.action, record.action.blocks
        record.blocks_done = min(max(blocks, 0), wanted)
        lost = wanted - record.blocks_done
        if wanted and not record.blocks_done:
            detail = (
                f"there was nothing to {action.kind}" if action.source is None else "the source had lost them"
            )
            self._end(record, ActionState.FAILED, detail, now_s)
        elif lost:
            who = "" if action.source is None else " at the source"
            detail = f"{lost} of {wanted} blocks were not there{who}"
            self._end(record, ActionState.DONE, detail, now_s)
        else:
            self._end(record, ActionState.DONE, "", now_s)

    def failed(self, action_id: str, detail: str, now_s: float, *, retryable: bool = False) -> None:
        """An attempt failed. A ``retryable`` one is planned again where its deadline leaves the time."""
        record = self._running.get(action_id)
        if record is None:
            return
        limits = self.limits
        pause_s = min(limits.backoff_s * 2.0 ** min(record.attempts - 1, 30), limits.max_backoff_s)
        if not retryable or now_s + pause_s >= record.action.deadline_s:
            self._end(record, ActionState.FAILED, detail, now_s)
            return
        self.budgets.end(record.action)
        del self._running[action_id]
        self._plan(record)
        record.state, record.started_s, record.not_before_s = ActionState.PLANNED, None, now_s + pause_s
        record.detail = f"attempt {record.attempts} failed: {detail}"

    def cancel(self, action_id: str, now_s: float, why: str = "cancelled on request") -> ActionRecord:
        """No effect on an action that has ended. Raises KeyError for one that is not known."""
        record = self.find(action_id)
        if record is None:
            raise KeyError(action_id)
        self._stop_now(record, ActionState.CANCELLED, why, now_s)
        return record

    def holder_left(self, instance_id: str, now_s: float) -> None:
        """An instance or a store is gone or down: what it was to send or to receive is cancelled."""
        for record in list(self.active()):
            source, target = record.action.source, record.action.target
            if instance_id == target.holder.instance_id or (
                source is not None and instance_id == source.holder.instance_id
            ):
                self._stop_now(record, ActionState.CANCELLED, f"{instance_id} is gone", now_s)

    def find(self, action_id: str) -> ActionRecord | None:
        return self._planned.get(action_id) or self._running.get(action_id) or self._ended.get(action_id)

    def active(self) -> Iterator[ActionRecord]:
        """Planned and running ones."""
        yield from self._planned.values()
        yield from self._running.values()

    def records(self, state: ActionState | None = None, limit: int = 100) -> list[ActionRecord]:
        """The latest, running ones first, then planned, then ended ones, each newest first."""
        everything = (
            record
            for part in (self._running, self._planned, self._ended)
            for record in reversed(part.values())
            if state in (None, record.state)
        )
        return list(islice(everything, limit))

    def counts(self) -> dict[ActionState, int]:
        """How many are planned and running."""
        return {ActionState.PLANNED: len(self._planned), ActionState.RUNNING: len(self._running)}

    def check_invariants(self) -> None:
        """Assert that states, budgets and bounds agree; for tests."""
        assert all(r.state is ActionState.PLANNED for r in self._planned.values())
        assert self._queue == sorted(self._planned.values(), key=_rank)
        assert all(r.state is ActionState.RUNNING for r in self._running.values())
        assert all(r.state.ended and r.ended_s is not None for r in self._ended.values())
        assert len(self._ended) <= self.limits.history and len(self._running) <= self.limits.max_running
        under_way: dict[Link, int] = {}
        for record in self._running.values():
            for link in links_of(record.action):
                under_way[link] = under_way.get(link, 0) + record.action.kv_bytes
        assert {k: v for k, v in under_way.items() if v} == self.budgets.under_way_bytes()

    def _expire(self, now_s: float) -> None:
        self._settling = [each for each in self._settling if each[0] > now_s]
        for record in list(self.active()):
            if record.action.deadline_s <= now_s:
                running = record.state is ActionState.RUNNING
                why = "still running" if running else record.detail or "waits for others"
                self._stop_now(record, ActionState.ABANDONED, f"its deadline came first ({why})", now_s)
            elif record.started_s is not None and record.started_s + self.limits.timeout_s <= now_s:
                why = f"no end within {self.limits.timeout_s:g} s"
                self._stop_now(record, ActionState.FAILED, why, now_s)

    def _plan(self, record: ActionRecord) -> None:
        self._planned[record.action.action_id] = record
        insort(self._queue, record, key=_rank)

    def _unplan(self, record: ActionRecord) -> None:
        del self._planned[record.action.action_id]
        self._queue.remove(record)

    def _waits_for(self, record: ActionRecord, moment: _Round) -> str | None:
        for link in record.links:
            if link in moment.congested:
                return moment.congested[link]
        action = record.action
        if action.kind in _FILLING:
            free = self._room(action.target, moment)
            if free is not None and action.kv_bytes > free:
                return f"waits for room at {action.target}"
        exhausted = self.budgets.exhausted(action, moment.now_s) if record.links else []
        for link in exhausted:
            moment.congested[link] = f"waits for the budget of {link}"
        return moment.congested[exhausted[0]] if exhausted else None

    def _room(self, place: Place, moment: _Round) -> float | None:
        if place not in moment.free_bytes:
            free = self.free_bytes(place)
            if free is not None:
                free -= sum(r.action.kv_bytes for r in self._running.values() if _fills(r.action, place))
                free -= sum(size for _, settling, size in self._settling if settling == place)
            moment.free_bytes[place] = free
        return moment.free_bytes[place]

    def _start(self, record: ActionRecord, moment: _Round) -> None:
        action = record.action
        self._unplan(record)
        self._running[action.action_id] = record
        self.budgets.begin(action, moment.now_s)
        free = moment.free_bytes.get(action.target)
        if free is not None and action.kind in _FILLING:
            moment.free_bytes[action.target] = free - action.kv_bytes
        record.state, record.started_s, record.detail = ActionState.RUNNING, moment.now_s, ""
        record.attempts += 1

    def _stop_now(self, record: ActionRecord, state: ActionState, why: str, now_s: float) -> None:
        if record.state.ended:
            return
        if record.state is ActionState.RUNNING:
            self._stop.append(record.action.action_id)
        self._end(record, state, why, now_s)
        self.changed()

    def _end(self, record: ActionRecord, state: ActionState, detail: str, now_s: float) -> None:
        action = record.action
        if record.state is ActionState.RUNNING:
            self.budgets.end(action)
            del self._running[action.action_id]
        else:
            self._unplan(record)
        record.state, record.detail, record.ended_s = state, detail, now_s
        if state is ActionState.DONE and action.kind in _FILLING:
            self._settling.append((now_s + SETTLE_S, action.target, record.moved_bytes))
        self._ended[action.action_id] = record
        while len(self._ended) > self.limits.history:
            self._ended.popitem(last=False)
        tally = self.tallies.setdefault(TallyKey(action.kind, record.executor or "none", state), Tally())
        tally.actions += 1
        tally.blocks += record.blocks_done
        tally.moved_bytes += record.moved_bytes
        tally.seconds += 0.0 if record.started_s is None else now_s - record.started_s
        tally.benefit_s += action.benefit_s


def _rank(record: ActionRecord) -> tuple[bool, float, float]:
    """Ordered ones, then those that promise most; of equals the first that came."""
    action = record.action
    return not record.ordered, action.cost_s - action.benefit_s, record.submitted_s


def _fills(action: TierAction, place: Place) -> bool:
    return action.kind in _FILLING and action.target == place
