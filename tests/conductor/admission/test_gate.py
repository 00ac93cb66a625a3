"""What a scheduler asks of admission for every request."""

from __future__ import annotations

import numpy as np
import pytest

from conductor.admission import Gate
from conductor.placement import PlacementRequest


def request(limit: int | None) -> PlacementRequest:
    return PlacementRequest("r", "m", np.empty(0, np.uint32), 64, max_output_tokens=limit)


@pytest.mark.parametrize("limit", [None, 1_000])
def test_predictions_hold_for_a_part_of_the_answers_seen(limit: int | None) -> None:
    gate = Gate()
    unseen = gate.output_tokens(request(limit), 1)
    gate.observe(request(limit), 2, 10)
    first = gate.output_tokens(request(limit), 1)
    assert first < unseen, "one answer is an eighth of none"
    for _ in range(600):
        gate.observe(request(limit), 2, 10)
    settled = gate.output_tokens(request(limit), 1)
    assert settled < 12
    for _ in range(32):
        gate.observe(request(limit), 2, 900)
        assert gate.output_tokens(request(limit), 1) == settled
    gate.observe(request(limit), 2, 900)
    assert gate.output_tokens(request(limit), 1) > settled


def test_each_limit_and_each_beginning_that_was_seen_is_predicted_for_itself() -> None:
    gate = Gate()
    for _ in range(400):
        gate.observe(request(None), 7, 500)
        gate.observe(request(None), 8, 20)
    long, short, new = (gate.output_tokens(request(None), beginning) for beginning in (7, 8, 9))
    assert short < 30 < new < long
    assert gate.output_tokens(request(50), 7) <= 50
    assert gate.output_tokens(request(None), 7) == long
