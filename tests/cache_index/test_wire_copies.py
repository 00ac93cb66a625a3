"""Blocks that are reported several times, as the compiled reader counts them."""

from __future__ import annotations

import pytest
from wire_twins import HOLDER, KNOWN, batch, check_same, removed, stored

from cache_index import Tier, kernels

pytestmark = pytest.mark.usefixtures("swept_between_groups")


def test_hits_reported_again_and_again_stay_bounded() -> None:
    """vLLM's report mode "full": every hit is a BlockStored, and no removal ever matches it."""
    prompt = batch(stored(range(1, 9), range(32), medium="GPU"))
    stream = check_same([KNOWN, *[prompt] * 300], group=50)
    assert stream.index._arrays.used(kernels.COPIES) == 8
    assert stream.index.stats().residencies == 9
    nbytes = stream.index.stats().bytes
    stream.apply([prompt] * 300)
    assert stream.index.stats().bytes == nbytes
    # the engine really drops the blocks: at most so many removals later they are gone for good
    stream.apply([batch(removed(*range(1, 9)))] * (kernels.MAX_EXTRA_COPIES + 1))
    assert stream.index.stats().residencies == 1
    assert stream.index._arrays.used(kernels.COPIES) == 0


def test_a_clear_ends_copies_too() -> None:
    prompt = batch(stored([1, 2], range(8)))
    stream = check_same([KNOWN, prompt, prompt, batch({"type": "AllBlocksCleared"}), prompt])
    stream.apply([batch(removed(1, 2))])
    assert stream.index.residencies(HOLDER) == set()


def test_removals_and_stores_of_one_step_keep_their_order() -> None:
    """The slot that a removal frees is used by the store behind it; copies are counted on the way."""
    step = batch(removed(1), removed(2), stored([1, 2], range(8)), removed(2), stored([2], range(4, 8), 1))
    stream = check_same([KNOWN, batch(stored([1, 2], range(8))), step, step])
    assert len(stream.index.residencies(HOLDER)) == 3
    assert {tier for _, tier in stream.index.residencies(HOLDER)} == {Tier.DEVICE}
    stream.apply([batch(removed(1), removed(2), removed(900))])
    assert stream.index.residencies(HOLDER) == set()
