"""Transfers between instances share the links at both ends."""

from __future__ import annotations

from collections.abc import Hashable
from math import inf

import pytest

from conductor.costs import Speed
from simulator.cluster.hand_offs import HandOffs

LINKS = {name: Speed(bytes_per_s=100.0, latency_s=0.5) for name in "abcd"}


def ends(transfers: HandOffs) -> dict[Hashable, float]:
    found = {}
    while len(transfers):
        end_s, key = transfers.next_end()
        transfers.end(key, end_s)
        found[key] = end_s
    return found


def test_alone_it_takes_latency_and_bandwidth() -> None:
    transfers = HandOffs(LINKS)
    assert transfers.next_end() == (inf, None)
    transfers.start(1, "a", "b", 200.0, 10.0)
    assert ends(transfers) == {1: pytest.approx(12.5)}


def test_two_from_one_giver_share_its_link() -> None:
    transfers = HandOffs(LINKS)
    transfers.start(1, "a", "b", 100.0, 0.0)
    transfers.start(2, "a", "c", 200.0, 0.0)
    # Both at 50/s until 2.5 s; then the second has 100 left at 100/s.
    assert ends(transfers) == {1: pytest.approx(2.5), 2: pytest.approx(3.5)}


def test_two_to_one_taker_share_its_link_from_when_the_second_comes() -> None:
    transfers = HandOffs(LINKS)
    transfers.start(1, "a", "c", 200.0, 0.0)
    transfers.start(2, "b", "c", 100.0, 1.5)
    # The first has moved 100 by 1.5 s, the rest at 50/s until 3.5 s; the second moves from 2.0 s on.
    assert ends(transfers) == {1: pytest.approx(3.5), 2: pytest.approx(3.75)}


def test_apart_they_do_not_meet() -> None:
    transfers = HandOffs(LINKS)
    transfers.start(1, "a", "b", 100.0, 0.0)
    transfers.start(2, "c", "d", 100.0, 0.0)
    assert ends(transfers) == {1: pytest.approx(1.5), 2: pytest.approx(1.5)}


def test_a_name_is_used_once() -> None:
    transfers = HandOffs(LINKS)
    transfers.start(1, "a", "b", 100.0, 0.0)
    with pytest.raises(ValueError, match="under way"):
        transfers.start(1, "a", "b", 100.0, 0.0)
