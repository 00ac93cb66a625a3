"""Policies by name, with the parameters of a configuration."""

import inspect
from pathlib import Path

import pytest

from conductor.policies import POLICIES, make_policy


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_is_made_by_the_name_it_carries(name: str) -> None:
    assert make_policy(name).name == name


def test_an_unknown_policy_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"unknown policy 'magic'; known: slo, mooncake, "):
        make_policy("magic")


def test_an_unknown_parameter_is_refused_with_the_known_ones() -> None:
    with pytest.raises(
        ValueError, match=r"policy 'mooncake': unknown parameter 'treshold'; known: kvcache_b"
    ):
        make_policy("mooncake", {"treshold": 2.0})
    with pytest.raises(ValueError, match=r"policy 'lmetric': unknown parameter 'x'; it takes none"):
        make_policy("lmetric", {"x": 1})


@pytest.mark.parametrize(
    ("name", "parameter", "value", "error"),
    [
        ("mooncake", "kvcache_balancing_threshold", 0.5, "must be a number of at least 1, not 0.5"),
        ("dynamo", "router_temperature", -1.0, "must be a number of at least 0, not -1.0"),
        ("dynamo", "overlap_score_credit", "high", "must be a number of at least 0, not 'high'"),
        ("dynamo", "prefill_load_scale", float("nan"), "must be a number of at least 0, not nan"),
        ("random", "seed", 1.5, "must be a whole number of at least 0, not 1.5"),
        ("smg", "mode", "tree", "must be one of event, approximate, not 'tree'"),
        ("smg", "cache_threshold", 30, "must be a number from 0 to 1, not 30"),
        ("smg", "max_tree_size", 0, "must be a whole number of at least 1, not 0"),
        ("llm_d", "decode_prefills", 1, "must be true or false, not 1"),
        ("llm_d", "non_cached_tokens", True, "must be a whole number of at least 0, not True"),
        ("preble", "window_s", 0.0, "must be a number from 0.001 to 1e+09, not 0.0"),
        ("aibrix_prefix_cache", "imbalance_abs_count", -1, "must be a whole number of at least 0, not -1"),
        ("aibrix_conductor", "pressure_threshold", 2, "must be a number from 0 to 1, not 2"),
    ],
)
def test_a_value_out_of_range_is_refused(name: str, parameter: str, value: object, error: str) -> None:
    with pytest.raises(ValueError) as refused:
        make_policy(name, {parameter: value})
    assert str(refused.value) == f"policy {name!r}: {parameter} {error}"


def test_the_documentation_names_every_policy_and_parameter() -> None:
    text = (Path(__file__).parents[3] / "docs" / "policies.md").read_text()
    for name, constructor in POLICIES.items():
        missing = [p for p in (name, *inspect.signature(constructor).parameters) if f"`{p}`" not in text]
        assert not missing, f"docs/policies.md does not name {missing} of {name}"
