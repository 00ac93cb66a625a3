"""Clusters in a word."""

from __future__ import annotations

import pytest

from conductor.cluster_shape import read_cluster_shape
from conductor.placement import Role


def test_a_number_is_of_mixed_instances_a_split_of_both_others() -> None:
    assert read_cluster_shape("30") == {Role.MIXED: 30}
    assert list(read_cluster_shape("2p10d").items()) == [(Role.PREFILL, 2), (Role.DECODE, 10)]


@pytest.mark.parametrize(
    "text", ["", "0", "0p2d", "2p0d", "4p", "p4", "4p4", "2d2p", "-1", "08", "٣", "eight", "8\n"]
)
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no cluster shape: neither a number"):
        read_cluster_shape(text)
