"""What sources list is brought into the real scheduler: added, replaced, withheld, drained, and whose it is."""

from __future__ import annotations

import pytest
from cluster_factory import facts, hold, make_scheduler, request
from hypothesis import given
from hypothesis import strategies as st

from conductor.cluster import Health
from conductor.discovery.roll import Listed, Roll
from conductor.instance_config import InstanceConfig
from conductor.membership import Membership
from conductor.placement import NoInstanceError, Usage
from conductor.scheduler import Scheduler


class Clock:
    def __init__(self) -> None:
        self.now_s = 1.0

    def __call__(self) -> float:
        return self.now_s


def config(instance_id: str, host: int = 1, **fields: object) -> InstanceConfig:
    return InstanceConfig.model_validate({"id": instance_id, "url": f"http://10.9.0.{host}:8000", **fields})


class Cluster:
    """A scheduler with one mixed instance of the configuration, `m0`, and a roll with two sources."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.scheduler: Scheduler = make_scheduler("m")
        given = [InstanceConfig(id="m0", url="http://10.0.0.0:8000")]
        self.membership = Membership(self.scheduler, self.clock, given)
        self.roll = Roll(self.membership, self.clock, drain_s=30.0)
        self.roll.add_source("file", "a file")
        self.roll.add_source("pods", "pods")

    def health(self, instance_id: str) -> Health:
        return self.scheduler.cluster[instance_id].health

    def ids(self) -> set[str]:
        return {instance.instance_id for instance in self.scheduler.cluster}


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


def test_what_is_listed_joins_and_what_is_no_longer_listed_is_drained(cluster: Cluster) -> None:
    cluster.roll.call("file", [Listed(config("a")), Listed(config("b", 2))])
    assert cluster.ids() == {"m0", "a", "b"}
    assert cluster.membership.source_of("a") == "file"
    cluster.scheduler.instance_up("a", facts())
    hold(cluster.scheduler, "a", request(4096).tokens)
    placement = cluster.scheduler.place(request(4096), 1.0)
    assert placement.decode.instance_id == "a"
    cluster.roll.call("file", [Listed(config("b", 2))])
    cluster.membership.check_drained()
    assert cluster.health("a") is Health.DRAINING
    cluster.scheduler.first_token(placement.placement_id, 2.0)
    cluster.scheduler.finished(placement.placement_id, 2.5, Usage())
    cluster.membership.check_drained()
    assert cluster.ids() == {"m0", "b"}
    assert cluster.roll.sources["file"].changes == {"added": 2, "drained": 1}


def test_the_same_list_again_changes_nothing(cluster: Cluster) -> None:
    cluster.roll.call("file", [Listed(config("a"))])
    before = cluster.scheduler.cluster["a"]
    cluster.roll.call("file", [Listed(config("a"))])
    assert cluster.scheduler.cluster["a"] is before
    cluster.roll.call("file", [Listed(config("a", role="prefill"))])
    assert cluster.scheduler.cluster["a"] is not before


def test_another_life_under_the_same_description_is_another_engine(cluster: Cluster) -> None:
    cluster.roll.call("pods", [Listed(config("a"), life="uid-1")])
    cluster.scheduler.instance_up("a", facts())
    hold(cluster.scheduler, "a", request(1024).tokens)
    before = cluster.scheduler.cluster["a"]
    cluster.roll.call("pods", [Listed(config("a"), life="uid-2")])
    assert cluster.scheduler.cluster["a"] is not before
    assert cluster.health("a") is Health.STARTING
    assert not cluster.scheduler.index.stats().residencies


def test_a_withheld_instance_keeps_its_cache_and_gets_no_requests(cluster: Cluster) -> None:
    cluster.membership.remove("m0")
    cluster.roll.call("pods", [Listed(config("a"))])
    cluster.scheduler.instance_up("a", facts())
    hold(cluster.scheduler, "a", request(1024).tokens)
    cluster.roll.call("pods", [Listed(config("a"), withheld="the pod is not ready")])
    assert cluster.health("a") is Health.WITHHELD
    with pytest.raises(NoInstanceError, match="the pod is not ready"):
        cluster.scheduler.place(request(1024), 1.0)
    cluster.scheduler.instance_up("a", facts())  # a probe that succeeds readmits nobody
    assert cluster.health("a") is Health.WITHHELD
    cluster.roll.call("pods", [Listed(config("a"))])
    assert cluster.health("a") is Health.UP
    assert cluster.scheduler.place(request(1024), 2.0).overlap_tokens == 1008
    assert cluster.roll.sources["pods"].changes == {"added": 1, "withheld": 1, "readmitted": 1}
    cluster.scheduler.check_invariants()


def test_an_instance_may_be_withheld_from_the_start_and_drained_from_there(cluster: Cluster) -> None:
    cluster.roll.call("pods", [Listed(config("a"), withheld="the pod is not ready yet")])
    assert cluster.health("a") is Health.STARTING
    cluster.scheduler.instance_up("a", facts())
    assert cluster.health("a") is Health.WITHHELD
    cluster.roll.call("pods", [])
    assert cluster.health("a") is Health.DRAINING
    cluster.membership.check_drained()
    assert cluster.ids() == {"m0"}


def test_another_sources_id_or_url_is_refused_until_it_is_let_go(cluster: Cluster) -> None:
    cluster.roll.call("file", [Listed(config("a", 1))])
    cluster.roll.call(
        "pods",
        [Listed(config("a", 7)), Listed(config("b", 1)), Listed(config("m0", 8)), Listed(config("c", 9))],
    )
    pods = cluster.roll.sources["pods"]
    assert cluster.ids() == {"m0", "a", "c"}
    assert pods.refused == {
        "a": "the id 'a' is taken by an instance of another source (file)",
        "b": "http://10.9.0.1:8000 is in the cluster already, as 'a' of another source (file)",
        "m0": "the id 'm0' is taken by an instance of another source (configuration)",
    }
    cluster.roll.call("file", [])
    cluster.membership.check_drained()
    cluster.roll.check()
    assert cluster.ids() == {"m0", "a", "b", "c"}
    assert cluster.scheduler.cluster["a"].url == "http://10.9.0.7:8000"
    assert pods.refused.keys() == {"m0"}


def test_what_was_taken_out_by_hand_stays_out_until_it_is_described_anew(cluster: Cluster) -> None:
    cluster.roll.call("file", [Listed(config("a"))])
    cluster.membership.remove("a")
    cluster.roll.call("file", [Listed(config("a")), Listed(config("b", 2))])
    cluster.roll.check()
    assert cluster.ids() == {"m0", "b"}
    cluster.roll.call("file", [Listed(config("a", role="decode")), Listed(config("b", 2))])
    assert cluster.ids() == {"m0", "a", "b"}


def test_an_unusable_description_leaves_the_last_good_one(cluster: Cluster) -> None:
    cluster.roll.call("pods", [Listed(config("a"))])
    cluster.roll.call("pods", [], {"a": "conductor.role: unknown"})
    assert cluster.health("a") is Health.STARTING
    cluster.roll.call("pods", [Listed(config("a", location="x//y"))])
    assert "site/zone/rack/node" in cluster.roll.sources["pods"].refused["a"]
    assert cluster.scheduler.cluster["a"].location == ""
    cluster.roll.call("pods", [])
    assert cluster.scheduler.cluster["a"].draining


def test_a_source_that_fails_keeps_its_list_and_says_why(cluster: Cluster) -> None:
    cluster.roll.call("pods", [Listed(config("a"))])
    cluster.roll.heard("pods")
    cluster.clock.now_s = 9.0
    cluster.roll.failed("pods", "the API server cannot be reached")
    state = cluster.roll.sources["pods"]
    assert (state.synced_s, state.error, state.failures) == (1.0, "the API server cannot be reached", 1)
    assert "a" in cluster.ids()
    cluster.roll.heard("pods")
    assert (state.synced_s, state.error) == (9.0, None)


_LISTS = st.lists(
    st.tuples(
        st.sampled_from(["file", "pods"]),
        st.dictionaries(
            st.sampled_from("abcd"),
            st.tuples(st.integers(1, 3), st.booleans(), st.integers(0, 1)),
            max_size=4,
        ),
    ),
    max_size=12,
)


@given(_LISTS)
def test_the_cluster_ends_as_the_last_lists_say(
    lists: list[tuple[str, dict[str, tuple[int, bool, int]]]],
) -> None:
    cluster = Cluster()
    last: dict[str, dict[str, tuple[int, bool, int]]] = {"file": {}, "pods": {}}
    for source, listing in lists:
        last[source] = listing
        cluster.roll.call(source, _listing(source, listing))
        for instance in list(cluster.scheduler.cluster):
            cluster.scheduler.instance_up(instance.instance_id, facts())
        cluster.membership.check_drained()
    cluster.roll.check()
    wanted = last["file"].keys() | last["pods"].keys()
    assert cluster.ids() == wanted | {"m0"}
    for source in ("file", "pods"):
        for instance_id, state in cluster.roll.sources[source].listed.items():
            assert cluster.membership.source_of(instance_id) == source
            role, withheld, _ = last[source][instance_id]
            instance = cluster.scheduler.cluster[instance_id]
            assert instance.role == ("prefill", "decode", "mixed")[role - 1]
            assert (instance.withheld is not None) is withheld
            assert state.withheld == instance.withheld
    cluster.scheduler.check_invariants()


def _listing(source: str, listing: dict[str, tuple[int, bool, int]]) -> list[Listed]:
    """Every id has a host of its own in each source, so that only ids are in dispute."""
    return [
        Listed(
            config(
                instance_id,
                ord(instance_id) + (100 if source == "pods" else 0),
                role=("prefill", "decode", "mixed")[role - 1],
            ),
            str(life),
            "why" if withheld else None,
        )
        for instance_id, (role, withheld, life) in listing.items()
    ]
