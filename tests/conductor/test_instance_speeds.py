"""Figures from the configuration in place of the catalogue's."""

import pytest
from pydantic import ValidationError

from cache_index import Tier
from conductor.catalogue import LLAMA_8B_H100
from conductor.costs import Codec, Speed
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


CODEC = {"ratio": 4, "encode_bytes_per_s": 1e9, "decode_bytes_per_s": 6e9}


def test_a_tier_may_encode() -> None:
    tiers = {"remote": {"bytes_per_s": 1e9, "latency_s": 0.1, "codec": CODEC}}
    c = InstanceSpeeds.model_validate({"tiers": tiers}).applied_to(LLAMA_8B_H100)
    speed = c.tiers[Tier.REMOTE]
    assert speed == Speed(1e9, 0.1, Codec(4.0, 1e9, 6e9))
    assert (speed.load_bytes_per_s, speed.store_bytes_per_s) == (4e9, 1e9)
    assert c.stored_bytes_per_token(Tier.REMOTE) == c.kv_bytes_per_token / 4
    assert c.stored_bytes_per_token(Tier.HOST) == c.kv_bytes_per_token
    assert c.tiers[Tier.DISK].load_bytes_per_s == c.tiers[Tier.DISK].bytes_per_s


@pytest.mark.parametrize(
    ("codec", "named"),
    [
        ({**CODEC, "ratio": 0.9}, r"tiers.remote.codec.ratio"),
        ({**CODEC, "decode_bytes_per_s": 0}, r"tiers.remote.codec.decode_bytes_per_s"),
        ({**CODEC, "encode_bytes_per_s": float("inf")}, r"tiers.remote.codec.encode_bytes_per_s"),
        ({"ratio": 2}, r"tiers.remote.codec.encode_bytes_per_s"),
        ({**CODEC, "name": "cachegen"}, r"tiers.remote.codec.name"),
    ],
)
def test_a_bad_codec_is_refused_by_name(codec: dict[str, float], named: str) -> None:
    with pytest.raises(ValidationError, match=named):
        InstanceSpeeds.model_validate({"tiers": {"remote": {"bytes_per_s": 1e9, "codec": codec}}})


def test_a_network_card_encodes_nothing() -> None:
    with pytest.raises(ValidationError, match=r"nic\.codec"):
        InstanceSpeeds.model_validate({"nic": {"bytes_per_s": 1e9, "codec": CODEC}})
