"""Clusters by name, with values replaced and instances split in other ways."""

from __future__ import annotations

from pathlib import Path

import pytest

from cache_index import Tier
from conductor.configuration_faults import ConfigError
from conductor.placement import Role
from simulator.experiments.clusters import ClusterSource, find_cluster, shipped_clusters


@pytest.fixture
def paired(tmp_path: Path) -> ClusterSource:
    path = tmp_path / "paired.yaml"
    path.write_text("instances: [{role: prefill, count: 2, tiers: {host: 1M}}, {role: decode, count: 2}]")
    return find_cluster(str(path))


@pytest.mark.parametrize("name", shipped_clusters())
def test_every_shipped_cluster_can_be_made(name: str) -> None:
    assert find_cluster(name).make() == find_cluster(f"{name}.yaml").make()


def test_the_clusters_of_papers_have_their_sizes() -> None:
    instances = find_cluster("mooncake-16").make().cluster.instances
    assert [spec.role for spec in instances] == [Role.PREFILL] * 8 + [Role.DECODE] * 8
    assert {spec.tier_tokens.get(Tier.HOST) for spec in instances[:8]} == {3_000_000}


def test_a_short_form_has_the_class_asked_for() -> None:
    instances = find_cluster("2p1d", "llama-3-70b-4xh200").make().cluster.instances
    assert [spec.instance_class.name for spec in instances] == ["llama-3-70b-4xh200"] * 3


def test_values_replace_those_of_the_file(paired: ClusterSource) -> None:
    settings = [
        ("instances.*.kv_tokens", "200k"),
        ("instances.1.sequences", 8),
        ("scheduling.admission.queue.capacity", 5),
    ]
    changed = paired.with_settings(settings).make()
    assert {spec.kv_tokens for spec in changed.cluster.instances} == {200_000}
    assert [spec.sequences for spec in changed.cluster.instances] == [256, 256, 8, 8]
    assert changed.scheduling.admission.queue.capacity == 5
    assert paired.make().scheduling.admission.queue.capacity == 0, "the source is as it was"


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("instances.2.count", "there is a list of 2 at '2'; give a number below that, or * for all"),
        ("instances.first.count", "there is a list of 2 at 'first'"),
        ("instances.0.count.x", "there is 2 where 'x' is looked for"),
        ("instances.0.cuont", "unknown key 'instances.0.cuont'; did you mean 'count'?"),
    ],
)
def test_paths_that_lead_nowhere_are_explained(paired: ClusterSource, path: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        paired.with_settings([(path, 1)]).make()
    assert message in str(caught.value)


def test_splits_change_how_many_of_each_role_there_are(paired: ClusterSource) -> None:
    split = paired.with_split("1p5d")
    assert split.name == "paired 1p5d"
    roles = [spec.role for spec in split.make().cluster.instances]
    assert roles == [Role.PREFILL] + [Role.DECODE] * 5
    assert find_cluster("4p4d").with_split("2p6d").name == "2p6d"
    for source, wrong in ((paired, "3"), (find_cluster("8"), "1p1d"), (paired, "1p"), (paired, "0p2d")):
        with pytest.raises(ConfigError, match="ratio"):
            source.with_split(wrong)


def test_what_is_no_cluster_is_explained() -> None:
    with pytest.raises(
        ConfigError,
        match=r"'h100' is no cluster shape: neither a number .* shipped are h100-4-tiers, h100-4p4d",
    ):
        find_cluster("h100")
    with pytest.raises(ConfigError, match=r"cannot read the cluster file .*gone.yaml"):
        find_cluster("gone.yaml")
