"""Promises of copies are corrected by what came of those before."""

from __future__ import annotations

import numpy as np
import pytest

from cache_index import Holder, Namespace, Tier
from conductor.actions import ActionKind, Place, Prefix
from conductor.tier_planner.prefix_tree import Segment
from conductor.tier_planner.track_record import TrackRecord

PLACE = Place(Holder("m0"), Tier.HOST)


def segment() -> Segment:
    return Segment(None, Prefix(Namespace("m", 16), np.array([1], np.uint64)), 0, 1, 0.0)


def test_copies_that_nobody_uses_are_believed_less() -> None:
    track = TrackRecord()
    assert track.factor(ActionKind.PREFETCH) == 1.0
    for number in range(40):
        track.brought(ActionKind.PREFETCH, segment(), PLACE, 0.5, number + 60.0)
        track.expire(number + 59.0)
    track.expire(1_000.0)
    assert track.factor(ActionKind.PREFETCH) == pytest.approx(1 / 21)
    assert track.factor(ActionKind.REPLICATE) == 1.0


def test_used_in_time_counts_once_and_too_late_does_not() -> None:
    track = TrackRecord()
    for late in (False, True) * 20:
        one = segment()
        track.brought(ActionKind.PREFETCH, one, PLACE, 1.0, 60.0)
        track.brought(ActionKind.PREFETCH, one, PLACE, 1.0, 90.0)  # the same again is no other
        if late:
            track.expire(60.0)
        track.used([one], PLACE)
        track.used([one], PLACE)
    assert track.factor(ActionKind.PREFETCH) == pytest.approx(21 / 41)


def test_better_than_promised_is_no_more_than_kept() -> None:
    track = TrackRecord()
    for _ in range(50):
        one = segment()
        track.brought(ActionKind.REPLICATE, one, PLACE, 0.1, 60.0)
        track.used([one], PLACE)
    assert track.factor(ActionKind.REPLICATE) == 1.0
