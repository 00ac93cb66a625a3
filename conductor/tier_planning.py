"""A tier planner at work in a running conductor: it plans in a thread, and its orders go into the ledger."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path

import structlog

from cache_index import SnapshotError
from conductor.action_ledger import ActionLedger
from conductor.actions import TierAction
from conductor.tier_planner import Returns, Site, TierPlanner

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class KeptReturns:
    """Where what was learned of reuse outlives the process, and how often it is saved."""

    path: Path
    interval_s: float

    def load(self, now_s: float) -> Returns | None:
        """What was saved; None, and why in the log, where that is of no use."""
        if not self.path.exists():
            return None
        try:
            returns = Returns.load(self.path, now_s, time.time())
        except SnapshotError as error:
            _log.warning("what was saved of reuse is ignored, learning starts anew", reason=str(error))
            return None
        _log.info("what was learned of reuse is loaded", requests=returns.seen, blocks=returns.known_blocks)
        return returns


class TierPlanning:
    """Belongs to the ledger's event loop. Seconds of the thread that plans are counted in ``planning_s``.

    ``sites`` tells, before every plan, where blocks may be put: instances and cache servers come and go.
    Nothing is planned while ``leads`` says no: another conductor does. What is learned of requests goes on.
    """

    def __init__(
        self,
        planner: TierPlanner,
        ledger: ActionLedger,
        sites: Callable[[], Sequence[Site]],
        clock: Callable[[], float],
        kept: KeptReturns | None = None,
    ) -> None:
        self.plans = 0
        self.planning_s = 0.0
        self.leads: Callable[[], bool] = lambda: True
        self._planner = planner
        self._ledger = ledger
        self._sites = sites
        self._known_sites: Sequence[Site] = ()
        self._clock = clock
        self._kept = kept
        self._turn = threading.Lock()  # of the planner: a thread that plans outlives its round's cancellation
        self._save_at_s = clock() + (inf if kept is None else kept.interval_s)
        self._saved = planner.requests_seen
        self._ordered: set[str] = set()

    async def plan_forever(self) -> None:
        """A plan that fails is logged and costs nothing but itself."""
        while True:
            await asyncio.sleep(self._planner.settings.every_s)
            try:
                if self.leads():
                    await self.plan()
                else:
                    await asyncio.to_thread(self._learn, self._clock())
                if self._clock() >= self._save_at_s:
                    await asyncio.to_thread(self.save)
            except Exception:  # whatever a rule runs into must not end the planning
                _log.exception("tier_planner.failed")

    def save(self) -> None:
        """What was learned, for the next process; a failure is logged. At the end, too, once nothing is planned."""
        if self._kept is None:
            return
        self._save_at_s = self._clock() + self._kept.interval_s
        try:
            with self._turn:
                self._planner.learn(self._clock())
                seen = self._planner.requests_seen
                if seen != self._saved:
                    self._planner.save_returns(self._kept.path, self._clock(), time.time())
                    self._saved = seen
        except OSError as error:
            _log.warning(
                "what was learned of reuse cannot be saved", path=str(self._kept.path), reason=str(error)
            )

    async def plan(self) -> None:
        """One round: the planner hears what has ended, and what it orders now is submitted."""
        for action_id in list(self._ordered):
            record = self._ledger.find(action_id)
            if record is None or record.state.ended:
                self._ordered.discard(action_id)
                if record is not None:
                    self._planner.ended(record)
        sites = self._sites()
        if sites != self._known_sites:
            self._planner.use_sites(sites)
            self._known_sites = sites
        begun_s = self._clock()
        actions = await asyncio.to_thread(self._plan, begun_s)
        now_s = self._clock()
        self.plans += 1
        self.planning_s += now_s - begun_s
        for action in actions:
            self._ledger.submit(action, now_s)
            self._ordered.add(action.action_id)
        self._planner.ordered(actions, now_s)

    def _plan(self, now_s: float) -> list[TierAction]:
        with self._turn:
            return self._planner.plan(now_s)

    def _learn(self, now_s: float) -> None:
        with self._turn:
            self._planner.learn(now_s)
