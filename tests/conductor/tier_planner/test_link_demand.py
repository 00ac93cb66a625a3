"""What a second of a link costs the requests that need it."""

from __future__ import annotations

import pytest
from cluster_factory import make_scheduler, request
from msgspec import structs

from cache_index import Holder, Tier
from conductor.explanation import PlacementRecord
from conductor.placement import PlanSegment
from conductor.tier_planner.link_demand import LEAST_PRICE, MEMORY_S, LinkDemand

POOL = Holder("pool")


def record_with(*segments: PlanSegment) -> PlacementRecord:
    record = make_scheduler("m").consider(request(64), 0.0)
    plan = structs.replace(record.placement.plan, segments=segments)
    record.placement = structs.replace(record.placement, plan=plan)
    return record


def test_a_busy_link_is_dear_and_an_idle_one_is_not() -> None:
    demand = LinkDemand()
    record = record_with(PlanSegment(0, 64, POOL, Tier.REMOTE))
    assert demand.price(POOL, 0.0) == LEAST_PRICE
    for second in range(600):  # half of every second
        demand.placed(record, lambda part: 0.5, float(second))
    assert demand.price(POOL, 600.0) == pytest.approx(1.0, rel=0.05)
    assert demand.price(Holder("other"), 600.0) == LEAST_PRICE
    assert demand.price(POOL, 600.0 + 10 * MEMORY_S) == LEAST_PRICE


def test_more_than_a_link_carries_has_a_price_still() -> None:
    demand = LinkDemand()
    record = record_with(PlanSegment(0, 64, POOL, Tier.REMOTE))
    for second in range(600):
        demand.placed(record, lambda part: 5.0, float(second))
    assert demand.price(POOL, 600.0) == pytest.approx(19.0)
