"""The engine profiles against the measurements they were fitted to."""

import pytest

from simulator import PROFILES, PerformanceModel

SMALL = PROFILES["llama-3.1-8b-h100"]
LARGE = PROFILES["llama3-70b-8xa800"]


@pytest.mark.parametrize(
    ("tokens", "tokens_per_s"), [(1024, 46e3), (4096, 45e3), (16_384, 37e3), (65_536, 21e3)]
)
def test_prefill_of_the_small_model_is_within_5_percent(tokens: int, tokens_per_s: float) -> None:
    assert SMALL.prefill_s(tokens) == pytest.approx(tokens / tokens_per_s, rel=0.05)


@pytest.mark.parametrize(
    ("sequences", "context", "step_ms"),
    [
        (1, 1024, 6.2),
        (16, 1024, 7.5),
        (64, 1024, 10.4),
        (16, 8192, 13.1),
        (64, 8192, 28.6),
        (128, 2048, 18.1),
    ],
)
def test_decode_steps_of_the_small_model_are_within_13_percent(
    sequences: int, context: int, step_ms: float
) -> None:
    assert SMALL.step_s(sequences, sequences * context) == pytest.approx(step_ms / 1000, rel=0.13)


@pytest.mark.parametrize("profile", [SMALL, LARGE])
def test_prefill_in_chunks_adds_up_to_prefill_in_one_piece(profile: PerformanceModel) -> None:
    chunks = profile.prefill_s(700) + profile.prefill_s(300, 700)
    assert chunks == pytest.approx(profile.prefill_s(1000))


def test_speed_divides_every_duration() -> None:
    fast = LARGE.at_speed(10)
    assert fast.prefill_s(1000, 500) == pytest.approx(LARGE.prefill_s(1000, 500) / 10)
    assert fast.cached_prefix_s(500) == pytest.approx(LARGE.cached_prefix_s(500) / 10)
    assert fast.step_s(3, 900, fast.prefill_s(10)) == pytest.approx(
        LARGE.step_s(3, 900, LARGE.prefill_s(10)) / 10
    )


def test_nothing_cached_costs_nothing() -> None:
    assert LARGE.cached_prefix_s(0) == 0.0


@pytest.mark.parametrize("speed", [0.0, -1.0, float("nan")])
def test_a_speed_must_be_positive(speed: float) -> None:
    with pytest.raises(ValueError, match="speed"):
        SMALL.at_speed(speed)
