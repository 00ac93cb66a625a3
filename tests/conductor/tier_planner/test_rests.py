"""What is left alone, and until when."""

from __future__ import annotations

from cache_index import Holder, Tier
from conductor.actions import Place
from conductor.tier_planner.rests import Rests

ONE, OTHER = Place(Holder("m0"), Tier.HOST), Place(Holder("m1"), Tier.HOST)


def test_a_rest_is_over_in_time_unless_it_begins_anew_or_is_ended() -> None:
    rests = Rests(60.0)
    for block_hash in (1, 2, 3):
        rests.begin(block_hash, ONE, 0.0)
    rests.begin(1, OTHER, 10.0)
    rests.begin(1, ONE, 20.0)
    rests.end(2, ONE)
    rests.end(2, OTHER)  # none there
    assert [rests.resting(each, ONE) for each in (1, 2, 3)] == [True, False, True]
    rests.expire(60.0)
    assert [rests.resting(each, ONE) for each in (1, 2, 3)] == [True, False, False]
    assert rests.resting(1, OTHER) and not rests.resting(2, OTHER)
    rests.expire(79.9)
    assert rests.resting(1, ONE) and not rests.resting(1, OTHER)
    rests.expire(80.0)
    assert not rests.resting(1, ONE)
