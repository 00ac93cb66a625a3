"""Cluster files: what they mean, and how mistakes in them are explained."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from cache_index import Tier
from conductor.catalogue import INSTANCE_CLASSES, LLAMA_8B_H100
from conductor.catalogue.profile_file import write_instance_class
from conductor.configuration_faults import ConfigError
from conductor.costs import DEFAULT_LINKS, Codec, Distance, Speed
from conductor.placement import Objectives, Role
from simulator.cluster import Outage, PoolSpec, uniform
from simulator.cluster.cluster_file import ClusterFile, make_cluster, read_cluster, short_form

WHOLE = """
instances:
  - {name: fill, count: 2, role: prefill, instance_class: llama3-70b-8xa800, tiers: {host: 3M, disk: 1TiB},
     pipeline: 2, location: s/z/r0, fetches_from_peers: true, streams_layers: true}
  - {name: big, role: decode, kv_tokens: 100k, sequences: 64}
  - {role: mixed, profile: mine.yaml}
pools:
  - {name: dram, tier: remote, capacity: 50M, bytes_per_s: 20e9, latency_s: 1e-3, members: [fill, big]}
  - {name: flash, tier: pod, capacity: 10GB, bytes_per_s: 5.0e9, members: [big]}
outages: [{instance: fill1, at_s: 100, for_s: 30}]
links: {rack: {bytes_per_s: 1.0e9, latency_s: 0.5}}
scheduling:
  policy: lmetric
  seed: 3
  objectives: {ttft_s: 30, tbt_s: 0.1, tbt_share: 1}
  admission: {rule: early, parameters: {limit: 0.9}, queue: {capacity: 10}}
"""
PROFILE = {"extends": "llama-3.1-8b-h100", "name": "mine", "kv_capacity_tokens": 5_000}


def read(folder: Path, content: str) -> ClusterFile:
    path = folder / "cluster.yaml"
    path.write_text(content)
    (folder / "mine.yaml").write_text(yaml.safe_dump(PROFILE))
    return read_cluster(path)


def test_gaps_that_are_not_measured_are_no_objective(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"scheduling.*objectives.tbt_share is 0.5: .*longest tenth"):
        read(tmp_path, WHOLE.replace("tbt_share: 1", "tbt_share: 0.5"))


def test_every_key_means_what_it_says(tmp_path: Path) -> None:
    found = read(tmp_path, WHOLE)
    first, second, big, mine = found.cluster.instances
    assert [first.name, second.name, big.name, mine.name] == ["fill0", "fill1", "big", "m0"]
    assert first.instance_class is INSTANCE_CLASSES["llama3-70b-8xa800"]
    assert first.tier_tokens == {Tier.HOST: 3_000_000, Tier.DISK: (1 << 40) // 327_680}
    assert first.kv_tokens == first.instance_class.kv_capacity_tokens
    assert (first.role, first.pipeline, first.location) == (Role.PREFILL, 2, "s/z/r0")
    assert first.fetches_from_peers and first.streams_layers
    assert (big.instance_class, big.kv_tokens, big.sequences) == (LLAMA_8B_H100, 100_000, 64)
    assert (mine.instance_class.name, mine.kv_tokens) == ("mine", 5_000)
    assert found.cluster.pools == (
        PoolSpec("dram", Tier.REMOTE, 50_000_000, Speed(20e9, 1e-3), frozenset({"fill0", "fill1", "big"})),
        PoolSpec("flash", Tier.POD, 10**10 // 131_072, Speed(5e9, 0.0), frozenset({"big"})),
    )
    assert found.cluster.outages == (Outage("fill1", 100.0, 30.0),)
    assert found.cluster.links == {**DEFAULT_LINKS, Distance.RACK: Speed(1e9, 0.5)}
    assert found.scheduling.objectives_s() == Objectives(30.0, 0.1, 1.0)
    assert (found.scheduling.policy, found.scheduling.admission.rule) == ("lmetric", "early")
    assert pickle.loads(pickle.dumps(found)) == found, "points travel to other processes"


ENCODING = """
instances:
  - {count: 2, tiers: {host: 1M, disk: 1TiB},
     codecs: {disk: {ratio: 4, encode_bytes_per_s: 5.0e+9, decode_bytes_per_s: 1.0e+10},
              remote: {ratio: 8, encode_bytes_per_s: 1.0e+9, decode_bytes_per_s: 2.0e+9}},
     write_back: [remote]}
pools:
  - {name: store, capacity: 100GB, bytes_per_s: 1.0e+9}
  - {name: counted, capacity: 1M, bytes_per_s: 1.0e+9}
"""


def test_a_tier_that_encodes_has_room_for_more(tmp_path: Path) -> None:
    cluster = read(tmp_path, ENCODING).cluster
    one, other = cluster.instances
    kind = one.instance_class
    assert kind == other.instance_class != LLAMA_8B_H100
    assert kind.name.startswith("llama-3.1-8b-h100+"), "it learns corrections of its own"
    assert kind.tiers[Tier.DISK] == replace(LLAMA_8B_H100.tiers[Tier.DISK], codec=Codec(4.0, 5e9, 1e10))
    assert kind.tiers[Tier.HOST].codec is None
    assert one.tier_tokens == {Tier.HOST: 1_000_000, Tier.DISK: 4 * (1 << 40) // 131_072}
    assert one.write_back == {Tier.REMOTE}
    assert [pool.capacity_tokens for pool in cluster.pools] == [8 * 10**11 // 131_072, 1_000_000]


@given(ratio=st.floats(1.0, 20.0), gigabytes=st.integers(1, 10_000))
def test_what_fits_by_a_ratio_is_never_more_than_there_is(ratio: float, gigabytes: int) -> None:
    codec = {"ratio": ratio, "encode_bytes_per_s": 1e9, "decode_bytes_per_s": 1e9}
    content = {
        "instances": [{"tiers": {"disk": f"{gigabytes}GB"}, "codecs": {"disk": codec, "remote": codec}}],
        "pools": [{"name": "store", "capacity": f"{gigabytes}GB", "bytes_per_s": 1e9}],
    }
    made = make_cluster(content, Path(), "").cluster
    for tokens in (made.instances[0].tier_tokens[Tier.DISK], made.pools[0].capacity_tokens):
        token_bytes = LLAMA_8B_H100.kv_bytes_per_token / ratio
        assert tokens * token_bytes <= gigabytes * 1e9 * (1 + 1e-12) < (tokens + 2) * token_bytes


def test_the_codec_of_a_profile_is_that_of_the_tier(tmp_path: Path) -> None:
    codec = {"ratio": 2, "encode_bytes_per_s": 1e9, "decode_bytes_per_s": 1e9}
    mine = {**PROFILE, "tiers": {"disk": {"codec": codec}}}
    (tmp_path / "encoding.yaml").write_text(yaml.safe_dump(mine))
    content = "instances: [{profile: encoding.yaml, tiers: {disk: 131072B}}]"
    (spec,) = read(tmp_path, content).cluster.instances
    assert spec.tier_tokens == {Tier.DISK: 2}


def test_a_tier_that_nothing_is_known_of_encodes_nothing(tmp_path: Path) -> None:
    write_instance_class(tmp_path / "bare.yaml", replace(LLAMA_8B_H100, name="bare", tiers={}))
    content = ENCODING.replace("{count: 2,", "{profile: bare.yaml,").replace(
        "tiers: {host: 1M, disk: 1TiB},", ""
    )
    with pytest.raises(
        ConfigError, match=r"instances.0.codecs.disk: class 'bare' has no speed for this tier"
    ):
        read(tmp_path, content)


def test_names_go_on_counting_over_groups(tmp_path: Path) -> None:
    content = "instances: [{count: 2}, {count: 1, role: decode}, {}, {name: m, count: 1}]"
    assert [spec.name for spec in read(tmp_path, content).cluster.instances] == ["m0", "m1", "d0", "m2", "m3"]


@pytest.mark.parametrize("text", ["8", "4p4d", "1", "1p12d"])
def test_short_forms_are_uniform_clusters(text: str) -> None:
    made = make_cluster(short_form(text, "llama-3-70b-4xh200"), Path(), text)
    assert made.cluster == uniform(text, INSTANCE_CLASSES["llama-3-70b-4xh200"])


def test_parameters_belong_to_the_policy_they_were_given_for(tmp_path: Path) -> None:
    scheduling = read(
        tmp_path, "instances: [{}]\nscheduling: {policy: slo, policy_parameters: {decode_prefill_tokens: 0}}"
    ).scheduling
    assert scheduling.policy_named("slo").policy_parameters == {"decode_prefill_tokens": 0}
    other = scheduling.policy_named("random")
    assert (other.policy, other.policy_parameters) == ("random", {})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("instances: [{rolle: mixed}]", "unknown key 'instances.0.rolle'; did you mean 'role'?"),
        ("instances: [{}]\npolls: []", "unknown key 'polls'; did you mean 'pools'?"),
        (
            "instances: [{}]\nscheduling: {objectives: {ttft: 1}}",
            "'scheduling.objectives.ttft'; did you mean 'ttft_s'?",
        ),
        ("instances: []", "'instances': List should have at least 1 item"),
        ("{}", "'instances' is required"),
        ("instances: [{count: 100001}]", "'instances.0.count': Input should be less than or equal to 100000"),
        ("instances: [{count: 0}]", "'instances.0.count': Input should be greater than or equal to 1"),
        ("instances: [{instance_class: llama-8b-h100}]", "did you mean 'llama-3.1-8b-h100'?"),
        ("instances: [{kv_tokens: lots}]", "'instances.0.kv_tokens': 'lots' is no size; write tokens"),
        (
            "instances: [{tiers: {remote: 3M}}]",
            "'instances.0.tiers.remote.[key]': Input should be 'host' or 'disk'",
        ),
        ("instances: [{location: a//b}]", "must look like site/zone/rack/node"),
        ("instances: [{pipeline: 2}]", "instances.0: instance 'm0': only an instance that just prefills"),
        (
            "instances: [{instance_class: x, profile: mine.yaml}]",
            "give instance_class (a name of the catalogue) or",
        ),
        ("instances: [{profile: gone.yaml}]", "instances.0.profile: cannot read the profile"),
        ("instances: [{name: a}, {name: a}]", "two instances are called 'a'"),
        ("instances: [{role: prefill}]", "all of them have the role prefill: add some of role decode"),
        ("instances: [{role: decode, count: 2}]", "the role decode: add some of role prefill, or make them"),
        ("instances: [{}]\noutages: [{instance: m1, at_s: 1, for_s: 1}]", "no instance is called 'm1'"),
        (
            "instances: [{name: fill}]\npools: [{name: p, capacity: 1M, bytes_per_s: 1.0e9, members: [fil]}]",
            "pools.0.members: no instance or group of instances is called 'fil'; did you mean 'fill'?",
        ),
        (
            "instances: [{}, {instance_class: llama3-70b-8xa800}]\npools: [{name: p, capacity: 1TB, "
            "bytes_per_s: 1}]",
            "pools.0.capacity: its members differ in the KV bytes of a token; give tokens",
        ),
        ("instances: [{}]\npools: [{name: p, tier: host, capacity: 1, bytes_per_s: 1}]", "'pod' or 'remote'"),
        ("instances: [{}]\nscheduling: {policy: best}", "unknown policy 'best'"),
        ("instances: [{}]\nscheduling: {admission: {rule: none}}", "unknown admission rule 'none'"),
        ("instances: [{}]\nlinks: {rack: {latency_s: 1}}", "'links.rack.bytes_per_s' is required"),
        (
            "instances: [{codecs: {remote: {ratio: 0.5, encode_bytes_per_s: 1, decode_bytes_per_s: 1}}}]",
            "'instances.0.codecs.remote.ratio': Input should be greater than or equal to 1",
        ),
        (
            "instances: [{codecs: {remote: {ratio: 2, encode_bytes_per_s: 1}}}]",
            "'instances.0.codecs.remote.decode_bytes_per_s' is required",
        ),
        (
            "instances: [{codecs: {remote: {ratios: 2}}}]",
            "unknown key 'instances.0.codecs.remote.ratios'; did you mean 'ratio'?",
        ),
        ("instances: [{codecs: {device: {}}}]", "'instances.0.codecs.device.[key]': Input should be 'host'"),
        (
            "instances: [{}, {codecs: {remote: {ratio: 2, encode_bytes_per_s: 1, decode_bytes_per_s: 1}}}]\n"
            "pools: [{name: p, capacity: 1M, bytes_per_s: 1}]",
            "pool 'p': m0 and m1 encode tier remote differently, by 1 and 2",
        ),
        (
            "instances: [{tiers: {disk: 1M}, write_back: [disk]}]",
            "write_back: nobody would hand anything down to tier disk; give a faster one",
        ),
        (
            "instances: [{tiers: {host: 1M}, write_back: [remote]}]",
            "instance 'm0': write_back: it has no tier remote",
        ),
        ("- a", "must hold a mapping such as 'instances: [{count: 8}]'"),
        ("instances: [", "is not valid YAML"),
    ],
)
def test_mistakes_are_explained(tmp_path: Path, content: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, content)
    assert message in str(caught.value)
    assert str(caught.value).startswith(str(tmp_path / "cluster.yaml"))


def test_a_tier_without_a_speed_comes_with_its_remedy(tmp_path: Path) -> None:
    write_instance_class(tmp_path / "bare.yaml", replace(LLAMA_8B_H100, name="bare", tiers={}))
    with pytest.raises(
        ConfigError, match=r"instances.0.tiers.host: class 'bare' has no speed .* in its profile"
    ):
        read(tmp_path, "instances: [{profile: bare.yaml, tiers: {host: 1M}}]")


def test_two_classes_cannot_share_a_name(tmp_path: Path) -> None:
    (tmp_path / "other.yaml").write_text(yaml.safe_dump({**PROFILE, "prefill_base_s": 0.5}))
    with pytest.raises(ConfigError, match=r"two classes with different figures are called 'mine'"):
        read(tmp_path, "instances: [{profile: mine.yaml}, {profile: other.yaml}]")
