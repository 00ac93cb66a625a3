from __future__ import annotations

import numpy as np

from cache_index import Namespace
from conductor.actions import Prefix
from conductor.tier_planner.prefix_tree import PrefixTree, Segment
from conductor.tier_planner.returns import Returns

NAMESPACE = Namespace("llama", 16)


def prompt(number: int, blocks: int) -> Prefix:
    return Prefix(NAMESPACE, np.arange(1_000 * number, 1_000 * number + blocks, dtype=np.uint64))


def ends(returns: Returns, number: int, routes: tuple[str, str], now_s: float) -> list[Segment]:
    """What two prompts, which came by these routes now, brought."""
    tree = PrefixTree()
    found = []
    for at, route in enumerate(routes):
        asked = prompt(number + at, 100)
        found.append(tree.use(asked, now_s)[-1])
        returns.observe(asked, now_s, route)
    return found


def test_each_route_has_rates_of_its_own() -> None:
    returns, now_s = Returns(), 0.0
    for number in range(1, 200, 2):
        for asked, route in ((prompt(number, 100), "goes on"), (prompt(number + 1, 100), "ends")):
            returns.observe(asked, now_s, route)
        returns.observe(prompt(number, 150), now_s + 30.0, "goes on")
        now_s += 31.0
    goes_on, is_over = returns.rates(ends(returns, 500, ("goes on", "ends"), now_s), now_s + 1.0)
    assert goes_on > 10.0 * is_over
    one, other = returns.rates(ends(returns, 600, ("new", "also new"), now_s), now_s + 1.0)
    assert one == other, "of routes that are new, the same is to be expected"
    assert is_over < one < goes_on
