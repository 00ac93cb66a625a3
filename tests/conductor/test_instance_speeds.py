"""Figures from the configuration in place of the catalogue's."""

import pytest
from pydantic import ValidationError

from cache_index import Tier
from conductor.catalogue import LLAMA_8B_H100
from conductor.costs import Speed
from conductor.instance_config import InstanceConfig
from conductor.instance_speeds import InstanceSpeeds
from conductor.membership import instance_of


def test_nothing_given_is_the_catalogue_entry() -> None:
    assert InstanceSpeeds().applied_to(LLAMA_8B_H100) is LLAMA_8B_H100


def test_given_figures_replace_and_the_rest_stays() -> None:
    speeds = InstanceSpeeds.model_validate(
        {
            "prefill_base_s": 0.0,
            "kv_bytes_per_token": 65_536,
            "nic": {"bytes_per_s": 1e9},
            "tiers": {"host": {"bytes_per_s": 2e9, "latency_s": 0.1}},
        }
    )
    c = speeds.applied_to(LLAMA_8B_H100)
    assert (c.prefill_base_s, c.kv_bytes_per_token, c.nic) == (0.0, 65_536, Speed(1e9, 0.0))
    assert c.tiers[Tier.HOST] == Speed(2e9, 0.1)
    assert c.tiers[Tier.DISK] == LLAMA_8B_H100.tiers[Tier.DISK]
    assert c.prefill_s_per_token == LLAMA_8B_H100.prefill_s_per_token
    assert c.name != LLAMA_8B_H100.name, "it learns corrections of its own"
    assert speeds.applied_to(LLAMA_8B_H100) == c


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"prefill_s_per_token": -1}, "prefill_s_per_token"),
        ({"tiers": {"tape": {"bytes_per_s": 1}}}, "tape"),
        ({"tiers": {"host": {"bytes_per_s": 0}}}, "bytes_per_s"),
        ({"prefil_base_s": 1}, "prefil_base_s"),
    ],
)
def test_bad_figures_are_refused_by_name(given: dict[str, object], named: str) -> None:
    with pytest.raises(ValidationError, match=named):
        InstanceSpeeds.model_validate(given)


def test_an_instance_has_them() -> None:
    config = InstanceConfig.model_validate({"id": "a", "url": "http://x:1", "speeds": {"chunk_tokens": 512}})
    assert instance_of(config).instance_class.chunk_tokens == 512
