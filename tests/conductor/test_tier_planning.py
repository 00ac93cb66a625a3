"""A planner at work in a running conductor: real ledger, real thread, and what it costs when a rule fails."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import numpy as np
from cluster_factory import BLOCK, make_scheduler, request
from structlog.testing import capture_logs

from cache_index import Holder, Namespace, Tier, sequence_hashes
from conductor.action_ledger import ActionLedger, ActionState
from conductor.actions import ActionKind, Place
from conductor.tier_planner import PlannerSettings, Site, TierPlanner
from conductor.tier_planning import KeptReturns, TierPlanning

HOST = Place(Holder("m0"), Tier.HOST)
SITES = [Site(HOST, 100 * BLOCK, frozenset({"m0"}))]


def planning(
    can: Callable[[], bool] = lambda: True, kept: KeptReturns | None = None
) -> tuple[TierPlanning, ActionLedger]:
    """One instance whose host tier of 100 blocks is full of prompts that came once."""
    scheduler = make_scheduler("m")
    planner = TierPlanner(
        scheduler.cluster,
        scheduler.index,
        SITES,
        lambda kind, source, target: can(),
        PlannerSettings(kinds=frozenset({ActionKind.EVICT}), every_s=0.02, learns_from=0),
        returns=None if kept is None else kept.load(100.0),
    )
    scheduler.on_placed = planner.placed
    for seed in range(10):
        asked = request(160, seed=seed)
        scheduler.place(asked, 0.0)
        hashes = sequence_hashes(asked.tokens, BLOCK)
        scheduler.index.store(HOST.holder, HOST.tier, Namespace("llama", BLOCK), hashes)
    ledger = ActionLedger()
    return TierPlanning(planner, ledger, lambda: SITES, lambda: 100.0, kept), ledger


async def test_what_is_planned_is_ordered() -> None:
    loop, ledger = planning()
    await loop.plan()
    ordered = ledger.records(ActionState.PLANNED)
    assert ordered and {r.action.kind for r in ordered} == {ActionKind.EVICT}
    assert sum(r.action.blocks for r in ordered) >= 5
    for action in ledger.advance(100.0).start:
        ledger.completed(action.action_id, action.blocks, 100.0)
    await loop.plan()
    assert loop.plans == 2


async def test_a_rule_that_fails_costs_its_round_and_no_more() -> None:
    failures = iter([RuntimeError("an executor does not know")])

    def can() -> bool:
        for failure in failures:
            raise failure
        return True

    loop, ledger = planning(can)
    with capture_logs() as logs:
        task = asyncio.create_task(loop.plan_forever())
        while not ledger.counts()[ActionState.PLANNED]:
            await asyncio.sleep(0.01)
        task.cancel()
    assert [log["event"] for log in logs] == ["tier_planner.failed"]


async def test_an_empty_cluster_plans_nothing() -> None:
    ledger = ActionLedger()
    scheduler = make_scheduler("m")
    planner = TierPlanner(scheduler.cluster, scheduler.index, [], lambda *each: True)
    loop = TierPlanning(planner, ledger, list, lambda: 1.0)
    await loop.plan()
    assert ledger.records() == []
    assert np.isclose(loop.planning_s, 0.0)


async def test_what_was_learned_outlives_the_process(tmp_path: Path) -> None:
    kept = KeptReturns(tmp_path / "reuse-snapshot", 60.0)
    with capture_logs() as logs:
        loop, _ = planning(kept=kept)
        await loop.plan()
        loop.save()
        saved = kept.path.stat()
        loop.save()
        assert kept.path.stat().st_mtime_ns == saved.st_mtime_ns, "nothing has come since"
        again, _ = planning(kept=kept)
        again.save()
    assert kept.path.stat().st_mtime_ns > saved.st_mtime_ns, "ten requests that no plan has read"
    assert logs == [
        {"event": "what was learned of reuse is loaded", "log_level": "info", "requests": 10, "blocks": 100}
    ]
    returns = kept.load(200.0)
    assert returns is not None and returns.seen == 20


async def test_a_broken_file_is_named_and_learning_starts_anew(tmp_path: Path) -> None:
    kept = KeptReturns(tmp_path / "reuse-snapshot", 60.0)
    kept.path.write_bytes(b"something else")
    with capture_logs() as logs:
        loop, ledger = planning(kept=kept)
    (log,) = logs
    assert log["event"] == "what was saved of reuse is ignored, learning starts anew"
    assert log["reason"] == f"{kept.path}: not what was learned of reuse"
    await loop.plan()
    assert ledger.records(ActionState.PLANNED)
    loop.save()
    returns = kept.load(100.0)
    assert returns is not None and returns.seen == 10, "what is learned now takes its place"


async def test_a_file_that_cannot_be_written_costs_a_warning(tmp_path: Path) -> None:
    kept = KeptReturns(tmp_path / "gone" / "reuse-snapshot", 60.0)
    loop, _ = planning(kept=kept)
    with capture_logs() as logs:
        loop.save()
    assert [(log["log_level"], log["path"]) for log in logs] == [("warning", str(kept.path))]


async def test_who_does_not_lead_learns_and_orders_nothing(tmp_path: Path) -> None:
    kept = KeptReturns(tmp_path / "reuse-snapshot", 0.0)
    loop, ledger = planning(kept=kept)
    loop.leads = lambda: False
    task = asyncio.create_task(loop.plan_forever())
    while not kept.path.exists():
        await asyncio.sleep(0.01)
    task.cancel()
    assert loop.plans == 0 and ledger.records() == []
    returns = kept.load(100.0)
    assert returns is not None and returns.seen == 10
