"""Splits hold out what they say, and errors are what they are called."""

from dataclasses import replace

import pytest
from silicon_table import COEFFICIENTS_OF, synthetic_runs

from simulator.accuracy import (
    SPLITS,
    Prediction,
    Run,
    errors_of,
    faster_than_peak,
    fit_all,
    held_out,
    in_sample,
    predict,
    split_decode_errors,
)

RUNS = synthetic_runs("vllm")


def test_errors_of_known_predictions() -> None:
    run = replace(RUNS[0], ttft_s=1.0, tpot_s=0.1)
    errors = errors_of([Prediction(run, 1.1, 0.08), Prediction(run, 2.0, 0.11), Prediction(run, 0.7, 0.13)])
    assert errors.runs == 3
    assert errors.ttft_median == pytest.approx(0.3)
    assert errors.ttft_mean == pytest.approx((0.1 + 1.0 + 0.3) / 3)
    assert errors.ttft_bias == pytest.approx(0.1)
    assert errors.tpot_median == pytest.approx(0.2)
    assert errors.tpot_mean == pytest.approx((0.2 + 0.1 + 0.3) / 3)
    assert errors.tpot_bias == pytest.approx(0.1)
    with pytest.raises(ValueError, match="no predictions"):
        errors_of([])


@pytest.mark.parametrize("split", SPLITS)
def test_a_prediction_does_not_depend_on_the_run_it_predicts(split: str) -> None:
    """Times of held-out runs may be anything: what is predicted of them stays."""
    folds = SPLITS[split](RUNS)
    assert sorted(id(run) for _, left_out in folds for run in left_out) == sorted(map(id, RUNS))
    for kept, left_out in folds:
        assert not {id(run) for run in kept} & {id(run) for run in left_out}
    _, spoilt = folds[0]
    spoilt_ids = {id(run) for run in spoilt}
    changed = [replace(run, tpot_s=9.0, ttft_s=9.0) if id(run) in spoilt_ids else run for run in RUNS]

    def by_shape(predictions: list[Prediction]) -> dict[tuple[object, ...], float]:
        return {_shape(p.run): p.tpot_s for p in predictions}

    before, after = by_shape(held_out(RUNS, split)), by_shape(held_out(changed, split))
    for run in spoilt:
        assert after[_shape(run)] == pytest.approx(before[_shape(run)], rel=1e-9)


def _shape(run: Run) -> tuple[object, ...]:
    return (run.model.name, run.tensor_parallel, run.users, run.prompt_tokens, run.output_tokens)


def test_runs_of_one_law_are_predicted_wherever_they_are_held_out() -> None:
    for split in SPLITS:
        assert errors_of(held_out(RUNS, split)).tpot_median < 0.03


def test_frameworks_have_coefficients_of_their_own() -> None:
    runs = [*RUNS, *synthetic_runs("sglang")]
    fitted = fit_all(runs)
    assert list(fitted) == ["sglang", "vllm"]
    assert fitted["sglang"].engine.met_prompts > 3 * fitted["vllm"].engine.met_prompts
    assert errors_of(in_sample(runs, fitted)).tpot_median < 0.01
    assert errors_of(predict(RUNS, COEFFICIENTS_OF["vllm"])).tpot_median == pytest.approx(0.0, abs=1e-9)


def test_runs_that_no_hardware_could_do_are_found() -> None:
    assert faster_than_peak(RUNS) == []
    impossible = replace(RUNS[5], tpot_s=RUNS[5].tpot_s / 20, ttft_s=RUNS[5].ttft_s / 20)
    found = faster_than_peak([*RUNS[:5], impossible, *RUNS[6:]])
    assert [(run.users, run.tpot_s) for run in found] == [(impossible.users, impossible.tpot_s)]


def test_disaggregated_runs_are_judged_by_their_decode_steps_alone() -> None:
    fitted = {"vllm": COEFFICIENTS_OF["vllm"]}
    split = replace(RUNS[0], split=True)
    ((run, error),) = split_decode_errors([*RUNS, split], fitted)
    assert run is split
    # Measured with prefills between its steps, this run is slower than steps alone.
    assert -0.5 < error < 0
    assert len(held_out([*RUNS, split], "random")) == len(RUNS)
