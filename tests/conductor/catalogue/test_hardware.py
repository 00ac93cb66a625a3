"""GPUs, tiers and links: typical values lie in documented ranges; paths are bound by their narrowest part."""

import pytest

from cache_index import Tier
from conductor.catalogue import GPUS, LINKS, TIERS, links_within, loading_speeds
from conductor.catalogue.tiers import CONNECTOR_S
from conductor.costs import DEFAULT_LINKS, Distance


@pytest.mark.parametrize("name", sorted(TIERS))
def test_typical_speed_lies_in_the_range_of_the_source(name: str) -> None:
    spec = TIERS[name]
    if spec.latency_s:
        assert spec.latency_s.low <= spec.typical.latency_s <= spec.latency_s.high
    if spec.bytes_per_s:
        assert spec.bytes_per_s.low <= spec.typical.bytes_per_s <= spec.bytes_per_s.high
    if spec.compression:
        assert 1.0 < spec.compression.low <= spec.compression.high
    assert spec.source


def test_nearer_tiers_cost_more() -> None:
    by_distance = ["hbm", "host-dram", "pod-flash", "nvme"]
    prices = [TIERS[name].price_per_gb for name in by_distance]
    assert [p and p.high for p in prices] == [40, 3, 0.5, 0.15]
    speeds = [TIERS[name].typical.bytes_per_s for name in by_distance]
    assert speeds == sorted(speeds, reverse=True)


@pytest.mark.parametrize("distance", list(Distance))
def test_default_links_promise_no_more_than_the_sources(distance: Distance) -> None:
    speed, links = DEFAULT_LINKS[distance], links_within(distance)
    assert speed.latency_s >= min(link.latency_s.low for link in links if link.latency_s)
    fastest = [link.bytes_per_s.high for link in links if link.bytes_per_s]
    assert not fastest or speed.bytes_per_s <= max(fastest)


def test_sites_are_milliseconds_apart() -> None:
    assert LINKS["wide-area"].latency_s == (5e-3, 80e-3)
    assert 5e-3 <= DEFAULT_LINKS[Distance.WORLD].latency_s <= 80e-3


def test_loading_is_bound_by_the_narrowest_part_of_the_path() -> None:
    one, eight = loading_speeds(GPUS["h100-80gb"], 1), loading_speeds(GPUS["h100-80gb"], 8)
    assert one[Tier.HOST].bytes_per_s == pytest.approx(0.78 * 64e9)  # PCIe of one GPU
    assert eight[Tier.HOST].bytes_per_s == 128e9  # the node's memory
    assert one[Tier.DISK] == eight[Tier.DISK]  # one drive
    assert one[Tier.REMOTE].bytes_per_s == pytest.approx(23.75e9)  # a GPU's share of the cards
    assert eight[Tier.REMOTE].bytes_per_s == 87e9
    assert all(speed.latency_s > CONNECTOR_S for speed in eight.values())


def test_tensor_cores_are_chosen_by_weight_size() -> None:
    assert GPUS["a100-80gb"].flops(1.0) == 312e12  # no FP8: widened to BF16
    assert GPUS["h100-80gb"].flops(1.0) == 1978e12
    assert GPUS["h100-80gb"].flops(0.5) == 1978e12  # no FP4: widened to FP8
    assert GPUS["b300"].flops(0.53) == 14e15
    assert GPUS["b300"].flops(2.0) == 2250e12


@pytest.mark.parametrize("name", sorted(GPUS))
def test_gpus_name_their_sources(name: str) -> None:
    gpu = GPUS[name]
    assert gpu.name == name
    assert gpu.source
    assert gpu.efficiency.source
