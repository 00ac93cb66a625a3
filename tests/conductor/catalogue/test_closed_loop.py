"""Closed loops obey what holds of any engine, whatever its coefficients."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conductor.catalogue import (
    ENGINES,
    GPUS,
    MODELS,
    SGLANG,
    VLLM,
    ClosedLoops,
    Deployment,
    Engine,
    Times,
    closed_loops,
    decode_step_s,
    kv_capacity_tokens,
    prefill_s,
)

LLAMA = Deployment(MODELS["llama-3.1-8b"], GPUS["h100-80gb"])


def _times(deployment: Deployment, users: int, prompt: int, output: int) -> tuple[float, float]:
    times = closed_loops(deployment, users, prompt, output).times(deployment.engine)
    return float(times.ttft_s[0]), float(times.tpot_s[0])


@pytest.mark.parametrize("engine", ENGINES.values(), ids=lambda engine: engine.name)
def test_a_lone_user_meets_an_idle_engine(engine: Engine) -> None:
    deployment = replace(LLAMA, engine=engine)
    ttft_s, tpot_s = _times(deployment, 1, 2048, 512)
    step_s = decode_step_s(deployment, 1, 2048 + 256)
    assert ttft_s == pytest.approx(
        deployment.engine.request_s + prefill_s(deployment, 2048), abs=1.01 * step_s
    )
    assert tpot_s == pytest.approx(step_s, rel=0.02)


@given(
    users=st.integers(1, 256),
    prompt=st.integers(64, 16_000),
    output=st.integers(16, 4000),
    engine=st.sampled_from([VLLM, SGLANG]),
)
@settings(max_examples=60)
def test_more_users_wait_longer_and_are_served_faster_altogether(
    users: int, prompt: int, output: int, engine: Engine
) -> None:
    """Both times grow with users; so does throughput, as long as nobody queues for KV cache."""
    deployment = replace(LLAMA, engine=engine)
    ttft_s, tpot_s = _times(deployment, users, prompt, output)
    more_ttft_s, more_tpot_s = _times(deployment, users + 8, prompt, output)
    assert 0 < tpot_s <= more_tpot_s * (1 + 1e-9)
    assert 0 < ttft_s <= more_ttft_s * (1 + 1e-9)
    cycle_s = ttft_s + (output - 1) * tpot_s
    more_cycle_s = more_ttft_s + (output - 1) * more_tpot_s
    # Where prefill is all there is to do, throughput is at its peak already, and prompts that meet cost something.
    assert more_cycle_s <= cycle_s * (users + 8) / users * (1 + 1e-9 + 0.5 * engine.met_prompts)


def test_who_does_not_fit_the_cache_queues() -> None:
    context = 4096 + 512
    fitting = int(kv_capacity_tokens(LLAMA) / context)
    ttft_s, tpot_s = _times(LLAMA, fitting, 4096, 1024)
    crowded_ttft_s, crowded_tpot_s = _times(LLAMA, 2 * fitting, 4096, 1024)
    assert crowded_tpot_s == pytest.approx(tpot_s, rel=0.03)  # no more run at once
    cycle_s = ttft_s + 1023 * tpot_s
    assert crowded_ttft_s - ttft_s == pytest.approx(cycle_s, rel=0.05)


def test_an_engine_that_does_not_mix_makes_first_tokens_wait_for_whole_batches() -> None:
    mixing, _ = _times(LLAMA, 64, 1024, 256)
    gathering, _ = _times(replace(LLAMA, engine=SGLANG), 64, 1024, 256)
    assert gathering > 2 * mixing


def test_prompts_held_back_delay_the_first_token_by_those_steps() -> None:
    at_once = closed_loops(LLAMA, 8, 1024, 1024).times(VLLM)
    held = closed_loops(LLAMA, 8, 1024, 1024, held_steps=20).times(VLLM)
    assert held.ttft_s[0] - at_once.ttft_s[0] == pytest.approx(
        20 * decode_step_s(LLAMA, 8, 8 * 1536), rel=1e-6
    )


def test_gathered_loops_take_what_each_takes() -> None:
    parts = [
        closed_loops(LLAMA, [4, 64], [1024, 4096], 512),
        closed_loops(Deployment(MODELS["llama-3-70b"], GPUS["h200"], 4), 16, 8192, 1024),
        closed_loops(Deployment(MODELS["qwen3-30b-a3b"], GPUS["h100-80gb"]), 16, 1024, 1024),
    ]
    together: Times = ClosedLoops.gathered(parts).times(VLLM)
    alone = [part.times(VLLM) for part in parts]
    assert np.allclose(together.ttft_s, np.concatenate([times.ttft_s for times in alone]))
    assert np.allclose(together.tpot_s, np.concatenate([times.tpot_s for times in alone]))


def test_weights_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="does not fit"):
        closed_loops(Deployment(MODELS["llama-3-70b"], GPUS["h100-80gb"]), 1, 1024, 1024)
