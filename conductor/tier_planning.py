"""A tier planner at work in a running conductor: it plans in a thread, and its orders go into the ledger."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import structlog

from conductor.action_ledger import ActionLedger
from conductor.tier_planner import Site, TierPlanner

_log = structlog.get_logger(__name__)


class TierPlanning:
    """Belongs to the ledger's event loop. Seconds of the thread that plans are counted in ``planning_s``.

    ``sites`` tells, before every plan, where blocks may be put: instances and cache servers come and go.
    Nothing is planned while ``leads`` says no: another conductor does.
    """

    def __init__(
        self,
        planner: TierPlanner,
        ledger: ActionLedger,
        sites: Callable[[], Sequence[Site]],
        clock: Callable[[], float],
    ) -> None:
        self.plans = 0
        self.planning_s = 0.0
        self.leads: Callable[[], bool] = lambda: True
        self._planner = planner
        self._ledger = ledger
        self._sites = sites
        self._known_sites: Sequence[Site] = ()
        self._clock = clock
        self._ordered: set[str] = set()

    async def plan_forever(self) -> None:
        """A plan that fails is logged and costs nothing but itself."""
        while True:
            await asyncio.sleep(self._planner.settings.every_s)
            if not self.leads():
                continue
            try:
                await self.plan()
            except Exception:  # whatever a rule runs into must not end the planning
                _log.exception("tier_planner.failed")

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
        actions = await asyncio.to_thread(self._planner.plan, begun_s)
        now_s = self._clock()
        self.plans += 1
        self.planning_s += now_s - begun_s
        for action in actions:
            self._ledger.submit(action, now_s)
            self._ordered.add(action.action_id)
