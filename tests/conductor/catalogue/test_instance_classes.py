"""Derived instance classes follow the roofline they were fitted to, and the measured ones nearly."""

import numpy as np
import pytest

from conductor.catalogue import (
    DEPLOYMENTS,
    GPUS,
    INSTANCE_CLASSES,
    KERNELS,
    LLAMA_8B_H100,
    LLAMA_70B_8XA800,
    MODELS,
    Deployment,
    InstanceClasses,
    derive_instance_class,
    kv_bytes_per_token,
)
from simulator.accuracy import affine_errors

PROMPTS = (1024, 4096, 16_384, 32_768)


@pytest.mark.parametrize("name", sorted(DEPLOYMENTS))
def test_fit_to_the_roofline(name: str) -> None:
    """Affine decode steps are nearly exact for dense models; a mixture's rise steeply first and then flatten."""
    deployment = DEPLOYMENTS[name]
    errors = affine_errors(INSTANCE_CLASSES[name], deployment)
    prefill, decode = np.abs(errors.prefill), np.abs(errors.decode)
    print(
        f"\n{name}: prefill {prefill.mean():.1%} (worst {prefill.max():.0%}), "
        f"decode {decode.mean():.1%} (worst {decode.max():.0%})",
        end="",
    )
    assert prefill.mean() < 0.07
    assert decode.mean() < (0.02 if deployment.model.experts is None else 0.20)


def test_derived_class_of_a_measured_pair_is_close_to_it() -> None:
    """What was measured there are kernels, without an engine around them."""
    deployment = Deployment(MODELS["llama-3.1-8b"], GPUS["h100-80gb"], engine=KERNELS)
    derived = derive_instance_class("derived", deployment)
    for tokens in PROMPTS:
        uncached = np.array([0])
        measured_s = LLAMA_8B_H100.prefill_s(tokens, uncached) - LLAMA_8B_H100.prefill_base_s
        assert derived.prefill_s(tokens, uncached)[0] == pytest.approx(measured_s[0], rel=0.20)
    for batch, context in ((1, 1024), (16, 1024), (64, 1024), (16, 8192), (64, 8192)):
        at = np.array([batch]), np.array([batch * context])
        assert derived.decode_step_s(*at)[0] == pytest.approx(LLAMA_8B_H100.decode_step_s(*at)[0], rel=0.15)
    assert derived.kv_bytes_per_token == LLAMA_8B_H100.kv_bytes_per_token
    assert derived.kv_capacity_tokens == pytest.approx(LLAMA_8B_H100.kv_capacity_tokens, rel=0.05)


def test_mooncake_node_moves_what_was_measured() -> None:
    derived = derive_instance_class("derived", Deployment(MODELS["llama-3-70b"], GPUS["a800-80gb"], 8))
    assert derived.nic.bytes_per_s == pytest.approx(LLAMA_70B_8XA800.nic.bytes_per_s, rel=0.01)
    assert derived.kv_bytes_per_token == LLAMA_70B_8XA800.kv_bytes_per_token
    assert derived.kv_capacity_tokens == pytest.approx(LLAMA_70B_8XA800.kv_capacity_tokens, rel=0.05)


@pytest.mark.parametrize("name", sorted(INSTANCE_CLASSES))
def test_constants_are_usable(name: str) -> None:
    instance_class = INSTANCE_CLASSES[name]
    assert instance_class.name == name
    for constant in (
        instance_class.prefill_s_per_token,
        instance_class.decode_base_s,
        instance_class.kv_bytes_per_token,
        instance_class.nic.bytes_per_s,
    ):
        assert constant > 0
    for constant in (
        instance_class.prefill_s_per_token_squared,
        instance_class.prefill_base_s,
        instance_class.prefill_s_per_cached_token,
        instance_class.decode_s_per_sequence,
        instance_class.decode_s_per_context_token,
    ):
        assert constant >= 0
    assert instance_class.kv_capacity_tokens > 32_768
    assert list(instance_class.tiers) == sorted(instance_class.tiers)


def test_names_are_known_before_anything_is_derived() -> None:
    derived: list[str] = []

    class Deployments(dict[str, Deployment]):
        def __getitem__(self, name: str) -> Deployment:
            derived.append(name)
            return super().__getitem__(name)

    classes = InstanceClasses((LLAMA_8B_H100,), Deployments(DEPLOYMENTS))
    assert "deepseek-v3-8xh200" in classes
    assert "no-such-class" not in classes
    assert len(classes) == 1 + len(DEPLOYMENTS)
    assert set(classes) == {LLAMA_8B_H100.name, *DEPLOYMENTS}
    assert derived == []
    assert classes["deepseek-v3-8xh200"] is classes["deepseek-v3-8xh200"]
    assert derived == ["deepseek-v3-8xh200"]
    with pytest.raises(KeyError):
        classes["no-such-class"]


def test_one_transfer_size_for_capacity_and_hand_off() -> None:
    v4 = INSTANCE_CLASSES["deepseek-v4-pro-8xb300"]
    deployment = DEPLOYMENTS["deepseek-v4-pro-8xb300"]
    assert v4.kv_bytes_per_token == kv_bytes_per_token(deployment.model, deployment.kv)
