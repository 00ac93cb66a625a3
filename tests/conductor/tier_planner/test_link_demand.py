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
        demand.load(POOL, 0.5, float(second))
    assert demand.price(POOL, 600.0) == pytest.approx(1.0, rel=0.05)
    assert demand.price(Holder("other"), 600.0) == LEAST_PRICE
    assert demand.price(POOL, 600.0 + 10 * MEMORY_S) == LEAST_PRICE


def test_more_than_a_link_carries_has_a_price_still() -> None:
    demand = LinkDemand()
    for second in range(600):
        demand.load(POOL, 5.0, float(second))
    assert demand.price(POOL, 600.0) == pytest.approx(19.0)


def test_copies_make_those_wait_longer_who_need_the_link_and_nobody_else() -> None:
    demand = LinkDemand()
    for second in range(600):
        demand.copy(POOL, 0.5, float(second))
    assert demand.price(POOL, 600.0) == LEAST_PRICE
    for second in range(600, 1200):
        demand.copy(POOL, 0.5, float(second))
        demand.load(POOL, 0.25, float(second))
    assert demand.price(POOL, 1200.0) == pytest.approx(0.25 / 0.25, rel=0.1)
