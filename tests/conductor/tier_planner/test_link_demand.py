"""What a second of a link costs the requests that need it."""

from __future__ import annotations

import pytest

from cache_index import Holder
from conductor.tier_planner.link_demand import LEAST_PRICE, MEMORY_S, LinkDemand

POOL = Holder("pool")


def test_a_busy_link_is_dear_and_an_idle_one_is_not() -> None:
    demand = LinkDemand()
    assert demand.price(POOL, 0.0) == LEAST_PRICE
    for second in range(600):  # half of every second
        demand.take(POOL, 0.5, float(second))
    assert demand.price(POOL, 600.0) == pytest.approx(1.0, rel=0.05)
    assert demand.price(Holder("other"), 600.0) == LEAST_PRICE
    assert demand.price(POOL, 600.0 + 10 * MEMORY_S) == LEAST_PRICE


def test_more_than_a_link_carries_has_a_price_still() -> None:
    demand = LinkDemand()
    for second in range(600):
        demand.take(POOL, 5.0, float(second))
    assert demand.price(POOL, 600.0) == pytest.approx(19.0)
