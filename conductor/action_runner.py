"""Carries tier actions out: takes them from the ledger, hands each to an executor, and reports how it went."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from traceback import format_exception

import structlog

from conductor.action_ledger import ActionLedger, Orders
from conductor.actions import ActionKind, ExecutionError, Executor, Place, TierAction

TICK_S = 0.1  # how late a deadline, a retry or a refilled budget may be seen

_log = structlog.get_logger(__name__)


async def _permitted(action: TierAction) -> None:
    """Nobody else acts."""


class ActionRunner:
    """Belongs to one event loop. Of several executors that can carry an action out the first does.

    ``permit`` is asked before every attempt, and raises ExecutionError where somebody else is to act.
    """

    def __init__(
        self, ledger: ActionLedger, executors: Sequence[Executor], clock: Callable[[], float]
    ) -> None:
        self.ledger = ledger
        self.executors = tuple(executors)
        self.faults: Counter[str] = Counter()  # errors of executors' own, by executor
        self.permit: Callable[[TierAction], Awaitable[None]] = _permitted
        self._clock = clock
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._wake = asyncio.Event()
        self._loop: asyncio.Task[None] | None = None
        self._closing = False

    def executor_for(self, kind: ActionKind, source: Place | None, target: Place) -> Executor | None:
        return next((each for each in self.executors if each.can(kind, source, target)), None)

    def why_none(self, kind: ActionKind, source: Place | None, target: Place) -> str:
        """Why no executor can, with what they can do between these places."""
        where = f"at {target}" if source is None else f"from {source} to {target}"
        if not self.executors:
            return f"nothing can {kind} {where}: no executors are configured (tiers.executors)"
        able = [
            f"{each.name}: {', '.join(kinds)}"
            for each in self.executors
            if (kinds := [k.value for k in ActionKind if each.can(k, source, target)])
        ]
        names = ", ".join(each.name for each in self.executors)
        can = f"there they can only do {'; '.join(able)}" if able else "they can do nothing there"
        return f"no executor can {kind} {where} ({names}); {can}"

    def holder_left(self, instance_id: str) -> None:
        """An instance or a store is down or gone: its actions are cancelled."""
        self.ledger.holder_left(instance_id, self._clock())

    def start(self) -> None:
        """Begin to take actions."""
        self.ledger.changed = self._wake.set
        self._loop = asyncio.create_task(self._run(), name="tier-actions")

    async def close(self, grace_s: float = 0.0) -> None:
        """Start nothing more; actions under way have ``grace_s`` to end, then they are cancelled."""
        if self._loop is not None:
            self._closing = True
            self._wake.set()
            await self._loop
        if self._tasks and grace_s > 0:
            await asyncio.wait(self._tasks.values(), timeout=grace_s)
        self.ledger.changed = lambda: None
        for record in list(self.ledger.active()):
            self.ledger.cancel(record.action.action_id, self._clock(), "the conductor stopped")
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self) -> None:
        while not self._closing:
            self._wake.clear()
            orders = self._next_orders()
            for action_id in orders.stop:
                if action_id in self._tasks:
                    self._tasks[action_id].cancel()
            for action in orders.start:
                task = asyncio.create_task(self._carry_out(action), name=f"tier-action {action.action_id}")
                self._tasks[action.action_id] = task
                task.add_done_callback(self._ended(action.action_id))
            idle = not any(self.ledger.counts().values())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(None if idle else TICK_S):
                    await self._wake.wait()

    def _next_orders(self) -> Orders:
        try:
            return self.ledger.advance(self._clock())
        except Exception as error:  # a fault of ours must not end the actions that come later
            self.faults["ledger"] += 1
            _log.error("tier_action.ledger_fault", exception="".join(format_exception(error)))
            return Orders([], [])

    async def _carry_out(self, action: TierAction) -> None:
        """Whatever an executor raises costs its action alone."""
        ledger, name = self.ledger, "none"
        try:
            executor = self.executor_for(action.kind, action.source, action.target)
            if executor is None:
                why = self.why_none(action.kind, action.source, action.target)
                ledger.failed(action.action_id, why, self._clock())
                return
            name = executor.name
            await self.permit(action)
            ledger.assigned(action.action_id, name)
            ledger.completed(action.action_id, await executor.execute(action), self._clock())
        except ExecutionError as error:
            ledger.failed(action.action_id, str(error), self._clock(), retryable=error.retryable)
        except Exception as error:
            self.faults[name] += 1
            _log.error(
                "tier_action.executor_fault",
                executor=name,
                kind=action.kind,
                exception="".join(format_exception(error)),  # drawn with all locals it would hold up the loop
            )
            ledger.failed(action.action_id, f"{type(error).__name__}: {error}"[:300], self._clock())

    def _ended(self, action_id: str) -> Callable[[asyncio.Task[None]], None]:
        def ended(task: asyncio.Task[None]) -> None:
            if self._tasks.get(action_id) is task:  # a retry may have begun
                del self._tasks[action_id]
            if task.cancelled():  # without effect unless its executor gave up by itself
                self.ledger.failed(action_id, "its executor gave up", self._clock())
            self._wake.set()

        return ended
