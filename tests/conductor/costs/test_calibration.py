"""The cost model reproduces the figures it was fitted to, and its calibration converges and stays bounded."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conductor.catalogue import INSTANCE_CLASSES, LLAMA_8B_H100, LLAMA_70B_8XA800
from conductor.costs import Calibration, dump_calibrations, load_calibrations
from conductor.costs.calibration import Scale


@pytest.mark.parametrize(
    ("tokens", "measured_tokens_per_s"), [(1024, 46e3), (4096, 45e3), (16384, 37e3), (65536, 21e3)]
)
def test_prefill_speed_of_8b_on_h100(tokens: int, measured_tokens_per_s: float) -> None:
    compute_s = LLAMA_8B_H100.prefill_s(tokens, np.array([0]))[0] - LLAMA_8B_H100.prefill_base_s
    assert compute_s == pytest.approx(tokens / measured_tokens_per_s, rel=0.08)


@pytest.mark.parametrize(
    ("tokens", "measured_s"), [(8192, 0.96), (16384, 2.00), (32768, 4.43), (131072, 27.41)]
)
def test_prefill_of_70b_on_a800_matches_mooncake_figure_14a(tokens: int, measured_s: float) -> None:
    compute_s = LLAMA_70B_8XA800.prefill_s(tokens, np.array([0]))[0] - LLAMA_70B_8XA800.prefill_base_s
    assert compute_s == pytest.approx(measured_s, rel=0.01)


@pytest.mark.parametrize(
    ("sequences", "context", "measured_s"),
    [(1, 1024, 6.2e-3), (16, 1024, 7.5e-3), (64, 1024, 10.4e-3), (16, 8192, 13.1e-3), (64, 8192, 28.6e-3)],
)
def test_decode_step_of_8b_on_h100(sequences: int, context: int, measured_s: float) -> None:
    step_s = LLAMA_8B_H100.decode_step_s(np.array([sequences]), np.array([sequences * context]))[0]
    assert step_s == pytest.approx(measured_s, rel=0.12)


@given(st.integers(1, 200_000), st.data())
def test_more_cache_never_costs_more(prompt_tokens: int, data: st.DataObject) -> None:
    cached = sorted(data.draw(st.lists(st.integers(0, prompt_tokens), min_size=2, max_size=2)))
    for instance_class in INSTANCE_CLASSES.values():
        less, more = instance_class.prefill_s(prompt_tokens, np.array(cached))
        assert more <= less + 1e-12
        assert more >= 0


def test_nothing_to_hand_off_costs_nothing() -> None:
    seconds = LLAMA_8B_H100.hand_off_s(np.array([0, 1000]))
    assert seconds[0] == 0.0
    assert seconds[1] == pytest.approx(1e-3 + 1000 * 131072 / 25e9)


@pytest.mark.parametrize("true_factor", [0.3, 1.0, 3.0])
def test_a_scale_learns_the_true_factor(true_factor: float) -> None:
    scale = Scale()
    for _ in range(200):
        scale.observe(0.1, 0.1 * true_factor)
    assert scale.factor == pytest.approx(true_factor, rel=0.02)


def test_one_outlier_moves_a_learned_scale_by_a_bounded_step() -> None:
    scale = Scale()
    for _ in range(500):
        scale.observe(0.1, 0.1)
    scale.observe(0.1, 1000.0)
    assert scale.factor <= 1.0 + Scale.FADE * (Scale.OUTLIER - 1) + 1e-9


def test_prompts_that_end_in_one_step_count_together() -> None:
    """The engine shows the time of a step at the first prompt that ends in it, and none at the others."""
    scale = Scale()
    for _ in range(300):
        scale.observe(0.1, 0.3)
        scale.observe(0.1, 0.0)
        scale.observe(0.1, 0.0)
    assert scale.factor == pytest.approx(1.0, rel=0.1)


def test_a_long_queue_does_not_make_a_scale_run_away() -> None:
    """Times observed long after they were predicted, with another factor: only the raw estimate counts."""
    scale = Scale()
    waiting = [0.1] * 200  # predicted before anything was learned
    for raw_s in waiting:
        scale.observe(raw_s, 2.0 * raw_s)
    assert scale.factor == pytest.approx(2.0, rel=0.02)


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0, 1000)), max_size=200))
def test_a_scale_stays_within_its_limits(observations: list[tuple[float, float]]) -> None:
    scale = Scale()
    for raw_s, observed_s in observations:
        scale.observe(raw_s, observed_s)
        assert 1 / Scale.LIMIT <= scale.factor <= Scale.LIMIT


def test_calibrations_survive_being_saved() -> None:
    loaded = load_calibrations(
        dump_calibrations({"a": Calibration(Scale(2.5, 40, 3.0), Scale(0.5, 7, 1.0))})
    )["a"]
    assert (loaded.prefill.factor, loaded.prefill.observations) == (2.5, 40)
    assert (loaded.decode.factor, loaded.decode.observations) == (0.5, 7)


def _saved(**figures: float) -> bytes:
    """A saved calibration with some figures replaced."""
    scale = {"factor": 1.0, "observations": 1, "raw_s": 1.0}
    return json.dumps({"a": {"prefill": {**scale, **figures}, "decode": scale}}).encode()


@pytest.mark.parametrize(
    "saved",
    [
        b"",
        b"[]",
        b"{",
        b'{"a": {}}',
        _saved(factor=1e9),
        _saved(raw_s=-1),
        _saved(observations=-1),
    ],
)
def test_a_broken_calibration_is_refused(saved: bytes) -> None:
    with pytest.raises(ValueError, match="calibration"):
        load_calibrations(saved)
