"""Room for KV as people write it."""

from __future__ import annotations

import pytest

from simulator.cluster.sizes import Size, read_size


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        (412_000, 412_000),
        ("412000", 412_000),
        ("412_000", 412_000),
        ("3M", 3_000_000),
        ("3M tokens", 3_000_000),
        ("1.5k", 1_500),
        ("100 tokens", 100),
        ("1e6", 1_000_000),
        ("131072B", 1),
        ("1.31072 MB", 10),
        ("1TiB", 8_388_608),
        ("640GB", 4_882_812),
    ],
)
def test_tokens_and_bytes(text: object, tokens: int) -> None:
    assert read_size(text).tokens(kv_bytes_per_token=131_072) == tokens


def test_bytes_are_told_from_tokens() -> None:
    assert read_size("2GB") == Size(2e9, in_bytes=True)
    assert read_size("2G") == Size(2e9)


@pytest.mark.parametrize("wrong", ["", "much", "3X", "-1", "3 M B", True, None, [1], "1 TiB tokens"])
def test_anything_else_is_no_size(wrong: object) -> None:
    with pytest.raises(ValueError, match=r"is no size; write tokens \(412000, 3M\) or bytes"):
        read_size(wrong)


@pytest.mark.parametrize("wrong", [0, 0.5, "0M", float("inf"), "0B"])
def test_nothing_is_no_room(wrong: object) -> None:
    with pytest.raises(ValueError, match="must be at least 1"):
        read_size(wrong)
