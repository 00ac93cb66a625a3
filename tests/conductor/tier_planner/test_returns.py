from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from cache_index import Namespace, SnapshotError
from conductor.actions import Prefix
from conductor.tier_planner.prefix_tree import PrefixTree, Segment
from conductor.tier_planner.returns import Returns, Visit

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
        returns.observe([Visit(asked, now_s, route)])
    return found


def test_each_route_has_rates_of_its_own() -> None:
    returns, now_s = Returns(), 0.0
    for number in range(1, 200, 2):
        for asked, route in ((prompt(number, 100), "goes on"), (prompt(number + 1, 100), "ends")):
            returns.observe([Visit(asked, now_s, route)])
        returns.observe([Visit(prompt(number, 150), now_s + 30.0, "goes on")])
        now_s += 31.0
    goes_on, is_over = returns.rates(ends(returns, 500, ("goes on", "ends"), now_s), now_s + 1.0)
    assert goes_on > 10.0 * is_over
    one, other = returns.rates(ends(returns, 600, ("new", "also new"), now_s), now_s + 1.0)
    assert one == other, "of routes that are new, the same is to be expected"
    assert is_over < one < goes_on


def taught(now_s: float = 0.0) -> tuple[Returns, list[Segment], float]:
    """Prompts of two sizes of blocks that came, what they brought, and when the last one did."""
    returns, tree = Returns(), PrefixTree()
    segments: list[Segment] = []
    for number in range(60):
        for namespace in (NAMESPACE, Namespace("llama", 64)):
            asked = Prefix(
                namespace, np.arange(1_000 * (number % 40), 1_000 * (number % 40) + 50, dtype=np.uint64)
            )
            segments += tree.use(asked, now_s)
            returns.observe([Visit(asked, now_s, "chat")])
        now_s += 7.0
    return returns, segments, now_s


@pytest.mark.parametrize("down_s", [0.0, 500.0])
def test_what_was_saved_is_as_old_as_it_has_become(tmp_path: Path, down_s: float) -> None:
    """The clock of requests starts anew with each process; what passed in between the wall clock tells."""
    returns, segments, now_s = taught()
    size = returns.save(tmp_path / "reuse", now_s, 1e9)
    assert size == (tmp_path / "reuse").stat().st_size
    restored = Returns.load(tmp_path / "reuse", 3.0, 1e9 + down_s)
    assert restored.seen == returns.seen == 120
    expected = returns.probabilities(segments, 60.0, now_s + down_s)
    assert expected.any()
    assert restored.probabilities(segments, 60.0, 3.0) == pytest.approx(expected)
    expected = returns.rates(segments, now_s + down_s)
    assert restored.rates(segments, 3.0) == pytest.approx(expected)


def test_a_clock_that_was_set_back_makes_nothing_younger(tmp_path: Path) -> None:
    returns, segments, now_s = taught()
    returns.save(tmp_path / "reuse", now_s, 1e9)
    restored = Returns.load(tmp_path / "reuse", now_s, 1e9 - 3600.0)
    expected = returns.probabilities(segments, 60.0, now_s)
    assert restored.probabilities(segments, 60.0, now_s) == pytest.approx(expected)


def test_nothing_learned_is_saved_and_loaded_too(tmp_path: Path) -> None:
    Returns().save(tmp_path / "reuse", 0.0, 0.0)
    assert Returns.load(tmp_path / "reuse", 0.0, 0.0).seen == 0


def test_broken_files_are_refused_with_the_reason(tmp_path: Path) -> None:
    path = tmp_path / "reuse"
    with pytest.raises(SnapshotError, match="cannot read"):
        Returns.load(path, 0.0, 0.0)
    taught()[0].save(path, 0.0, 0.0)
    whole = path.read_bytes()
    for content, reason in (
        (b"", "not what was learned of reuse"),
        (b"KVINDEX\n" + whole[8:], "not what was learned of reuse"),
        (whole[:8] + b"\x09" + whole[9:], "format version 9, which is newer than 1"),
        (whole[: len(whole) // 2], "truncated"),
        (whole[:-100] + bytes([whole[-100] ^ 1]) + whole[-99:], "checksum"),
        (whole.replace(b'"seen"', b'"soon"'), "checksum"),
    ):
        path.write_bytes(content)
        with pytest.raises(SnapshotError, match=reason) as refused:
            Returns.load(path, 0.0, 0.0)
        assert str(path) in str(refused.value)
