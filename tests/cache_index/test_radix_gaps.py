"""Jumps while matching: exact whatever the holders lack, and whatever callers say about parents."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from index_oracle import NAMESPACE, Both, chain

from cache_index import CacheIndex, Holder, Namespace, Tier

Tree = list[np.ndarray]


def branching_chains(dice: random.Random, count: int, length: int) -> Tree:
    """Chains that share beginnings of any length with each other, as prompts do."""
    chains = [chain(dice.randrange(1 << 60), length)]
    while len(chains) < count:
        base = dice.choice(chains)
        shared = dice.choice([0, 1, dice.randrange(length), length // 2])
        own = chain(dice.randrange(1 << 60), dice.randrange(1, length + 1))
        chains.append(np.concatenate([base[:shared], own])[:length])
    return chains


def drive(dice: random.Random, both: Both, fleet: list[Holder], chains: Tree, steps: int) -> Iterator[str]:
    """Random events; yields what was done."""
    tiers = [Tier.DEVICE, Tier.DEVICE, Tier.DEVICE, Tier.HOST, Tier.DISK, Tier.REMOTE]
    for _ in range(steps):
        holder, tier, hashes = dice.choice(fleet), dice.choice(tiers), dice.choice(chains)
        start, stop = sorted(dice.randrange(len(hashes) + 1) for _ in range(2))
        parent = int(hashes[start - 1]) if start else 0
        action = dice.choices(
            [
                "whole",
                "piece",
                "no parent",
                "lie",
                "trim",
                "hole",
                "root first",
                "one by one",
                "clear",
                "new",
            ],
            [30, 12, 4, 2, 18, 10, 3, 8, 2, 1],
        )[0]
        if action == "whole":
            both.store(holder, tier, hashes[:stop])
        elif action == "piece":
            both.store(holder, tier, hashes[start:stop], parent=parent)
        elif action == "no parent":
            both.store(holder, tier, hashes[start:stop])
        elif action == "lie":
            both.store(holder, tier, hashes[start:stop], parent=int(chain(dice.randrange(9), 1)[0]))
        elif action == "trim":
            both.remove(holder, tier, hashes[start:][::-1])
        elif action == "hole":
            both.remove(holder, tier, hashes[start : start + dice.choice([1, 1, 3])])
        elif action == "root first":
            both.remove(holder, tier, hashes[:stop])
        elif action == "one by one":
            for position in range(start, min(stop, start + 8)):
                above = int(hashes[position - 1]) if position else 0
                both.store(holder, tier, hashes[position : position + 1], parent=above)
        elif action == "clear":
            both.clear(holder, dice.choice([None, tier]))
        else:
            both.unregister(holder)
            both.register(holder)
        yield action


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("holders", "length"), [(3, 40), (12, 300), (70, 120)])
def test_random_events(seed: int, holders: int, length: int, tmp_path: Path) -> None:
    dice = random.Random(1000 * seed + holders)
    both = Both()
    fleet = [Holder(f"h{number}") for number in range(holders)]
    for holder in fleet:
        both.register(holder)
    chains = branching_chains(dice, 12, length)
    for step, _ in enumerate(drive(dice, both, fleet, chains, 500)):
        if dice.random() < 0.3:
            both.index.reclaim(dice.randrange(1, 3000))
        hashes = dice.choice(chains)
        begin = dice.choice([0, 0, 0, dice.randrange(len(hashes))])
        both.check_match(hashes[begin : dice.randrange(begin, len(hashes) + 1)])
        if step % 100 == 99:
            both.check_residencies()
            for each in chains:
                both.check_match(each)
        if step == 250:
            both.save_and_load(tmp_path / "index")
    both.check_reclaimed()
    for hashes in chains:
        both.check_match(hashes)
    for holder in fleet:
        both.clear(holder)
    both.check_reclaimed()
    assert both.index.stats().blocks == both.index.stats().gaps == 0


def clean_fleet(both: Both, count: int) -> list[Holder]:
    fleet = [Holder(f"h{number}") for number in range(count)]
    for holder in fleet:
        both.register(holder)
    return fleet


def gaps(index: CacheIndex) -> int:
    return index.stats().gaps


def test_chains_that_grow_and_shrink_at_their_end_leave_no_gap() -> None:
    both = Both()
    fleet = clean_fleet(both, 5)
    hashes, branch = chain(1, 100), chain(2, 50)
    for number, holder in enumerate(fleet):
        both.store(holder, Tier.DEVICE, hashes[: 60 + 10 * number])
        both.store(holder, Tier.DEVICE, branch, parent=int(hashes[29]))
        for position in range(49, 20, -1):
            both.remove(holder, Tier.DEVICE, branch[position : position + 1])
    assert gaps(both.index) == 0
    for holder in fleet:
        both.remove(holder, Tier.DEVICE, branch[:21][::-1])
        both.remove(holder, Tier.DEVICE, hashes[::-1])
    assert gaps(both.index) == 0
    assert both.index.stats().blocks == 0


def test_a_gap_heals_when_the_block_comes_back() -> None:
    both = Both()
    (holder,) = clean_fleet(both, 1)
    hashes = chain(1, 50)
    both.store(holder, Tier.DEVICE, hashes)
    both.remove(holder, Tier.DEVICE, hashes[10:13])
    assert gaps(both.index) > 0
    both.check_match(hashes)
    both.store(holder, Tier.DEVICE, hashes[10:13], parent=int(hashes[9]))
    assert gaps(both.index) == 0
    both.check_match(hashes)


def test_a_gap_goes_with_the_blocks_behind_it() -> None:
    both = Both()
    (holder,) = clean_fleet(both, 1)
    hashes = chain(1, 50)
    both.store(holder, Tier.DEVICE, hashes)
    both.remove(holder, Tier.DEVICE, hashes[10:11])
    both.remove(holder, Tier.DEVICE, hashes[11:][::-1])
    assert gaps(both.index) == 0
    both.store(holder, Tier.DEVICE, hashes)
    both.remove(holder, Tier.DEVICE, hashes[10:11])
    both.clear(holder)
    both.check_reclaimed()
    assert gaps(both.index) == 0


def test_a_root_that_is_none() -> None:
    """A caller that does not know parents says "root"; those that do are not misled."""
    both = Both()
    first, second = clean_fleet(both, 2)
    hashes = chain(1, 64)
    both.store(first, Tier.DEVICE, hashes[:20])
    both.store(first, Tier.DEVICE, hashes[21:])
    both.check_match(hashes)
    both.store(second, Tier.DEVICE, hashes)
    both.check_match(hashes)
    both.store(first, Tier.DEVICE, hashes[20:21], parent=int(hashes[19]))
    both.check_match(hashes)


def test_blocks_one_by_one_without_parents() -> None:
    both = Both()
    pool, engine = clean_fleet(both, 2)
    hashes = chain(1, 200)
    for position in range(0, 200):
        if position % 50 != 30:
            both.store(pool, Tier.POD, hashes[position : position + 1])
    both.check_match(hashes)
    both.store(engine, Tier.DEVICE, hashes[:150])
    both.check_match(hashes)
    both.remove(engine, Tier.DEVICE, hashes[:150][::-1])
    both.check_match(hashes)


def test_very_long_prompts() -> None:
    both = Both()
    fleet = clean_fleet(both, 4)
    hashes = chain(1, 70_000)
    for holder, length in zip(fleet, (70_000, 62_500, 33, 0), strict=True):
        both.index.store(holder, Tier.DEVICE, NAMESPACE, hashes[:length])
    both.index.remove(fleet[0], Tier.DEVICE, NAMESPACE, hashes[65_000:65_001])
    rows = [both.index.holder_id(holder) for holder in fleet]
    assert both.index.match(NAMESPACE, hashes)[rows, 0].tolist() == [65_000, 62_500, 33, 0]
    assert both.index.match(NAMESPACE, hashes[1:])[rows, 0].tolist() == [64_999, 62_499, 32, 0]


def test_namespaces_do_not_meet() -> None:
    both = Both()
    (holder,) = clean_fleet(both, 1)
    hashes = chain(1, 40)
    other = Namespace("model", 32)
    both.store(holder, Tier.DEVICE, hashes)
    both.store(holder, Tier.DEVICE, hashes[:10], other)
    both.remove(holder, Tier.DEVICE, hashes[3:4], other)
    both.check_match(hashes)
    both.check_match(hashes, other)
