"""The shared link: equal shares, recomputed whenever a transfer starts or ends."""

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator import SharedLink


def run_until_empty(link: SharedLink, arrivals: dict[str, tuple[float, int]]) -> dict[str, float]:
    """Start every transfer at its time; when each ended."""
    ended: dict[str, float] = {}
    for name, (start_s, size_bytes) in sorted(arrivals.items(), key=lambda item: item[1][0]):
        while link.next_end_s <= start_s:
            now_s = link.next_end_s
            ended |= dict.fromkeys(link.finished(now_s), now_s)
        link.start(name, size_bytes, start_s)
    while (now_s := link.next_end_s) != inf:
        ended |= dict.fromkeys(link.finished(now_s), now_s)
    return ended


def test_one_transfer_has_the_link_alone() -> None:
    assert run_until_empty(SharedLink(100.0), {"a": (5.0, 200)}) == {"a": pytest.approx(7.0)}


def test_concurrent_transfers_share() -> None:
    ended = run_until_empty(SharedLink(100.0), {"a": (0.0, 100), "b": (0.5, 100)})
    # a alone for 0.5 s, both for 1 s, then b has 50 bytes left to itself.
    assert ended == {"a": pytest.approx(1.5), "b": pytest.approx(2.0)}


def test_a_late_caller_sees_ends_in_order() -> None:
    link = SharedLink(10.0)
    link.start("long", 100, 0.0)
    link.start("short", 10, 0.0)
    assert link.finished(1.9) == []
    assert link.finished(100.0) == ["short", "long"]
    assert link.next_end_s == inf


def test_cancelling_gives_the_share_back() -> None:
    link = SharedLink(10.0)
    link.start("a", 100, 0.0)
    link.start("b", 100, 0.0)
    link.cancel("a", 10.0)
    assert link.next_end_s == pytest.approx(15.0)


def test_a_name_cannot_be_used_twice_at_once() -> None:
    link = SharedLink(10.0)
    link.start("a", 100, 0.0)
    with pytest.raises(ValueError, match="in flight"):
        link.start("a", 100, 1.0)
    with pytest.raises(ValueError, match="bandwidth"):
        SharedLink(0.0)


@given(st.lists(st.tuples(st.floats(0, 10), st.integers(1, 1000)), min_size=1, max_size=8))
def test_a_busy_link_moves_exactly_its_bandwidth(transfers: list[tuple[float, int]]) -> None:
    arrivals = {str(index): (0.0, size) for index, (_, size) in enumerate(transfers)}
    ended = run_until_empty(SharedLink(100.0), arrivals)
    assert max(ended.values()) == pytest.approx(sum(size for _, size in transfers) / 100.0, abs=0.05)
    staggered = {str(index): transfer for index, transfer in enumerate(transfers)}
    later = run_until_empty(SharedLink(100.0), staggered)
    for name, (start_s, size) in staggered.items():
        assert later[name] >= start_s + size / 100.0 - 0.05
