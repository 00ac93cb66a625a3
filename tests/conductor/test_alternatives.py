"""Where else a placed request could go."""

from __future__ import annotations

import pytest
from cluster_factory import hold, make_scheduler, request

from conductor.alternatives import alternatives
from conductor.explanation import PlacementRecord


def placed(roles: str, **cached_tokens: int) -> PlacementRecord:
    scheduler = make_scheduler(roles)
    asked = request(2_048)
    for instance_id, tokens in cached_tokens.items():
        hold(scheduler, instance_id, asked.tokens[:tokens])
    record = scheduler.find(scheduler.place(asked, 0.0).placement_id)
    assert record is not None
    return record


def named(record: PlacementRecord, limit: int) -> list[str]:
    return [each.instance_id for each in alternatives(record, limit)]


def test_the_next_best_come_first() -> None:
    record = placed("mmm", m1=2_032, m2=1_024)
    assert record.placement.decode.instance_id == "m1"
    assert named(record, 8) == ["m2", "m0"]


def test_only_what_can_stand_in_for_the_leg_that_answers() -> None:
    record = placed("ppdd", p0=2_032)
    assert record.placement.disaggregated
    assert {record.placement.decode.instance_id, *named(record, 8)} == {"d2", "d3"}


@pytest.mark.parametrize(("limit", "expected"), [(0, 0), (1, 1), (2, 2), (9, 3)])
def test_no_more_than_asked_for(limit: int, expected: int) -> None:
    assert len(named(placed("mmmm"), limit)) == expected
