"""Schedulers whose decisions are recorded, over small clusters that are not up yet."""

from collections.abc import Mapping, Sequence

from cluster_factory import ROLES

from cache_index import CacheIndex
from conductor.admission import Gate, make_rule
from conductor.catalogue import LLAMA_8B_H100
from conductor.circuit import SuspensionPolicy
from conductor.cluster import Cluster, InstanceState, make_instance
from conductor.costs import PoolLink, Topology
from conductor.journal import Frame, Header, RecordedPolicy
from conductor.placement import Objectives
from conductor.policies import make_policy
from conductor.recorded_scheduler import RecordedScheduler, make_header


def make_state(instance_id: str, ranks: int = 1, location: str = "") -> InstanceState:
    """An instance whose role is the first letter of its id."""
    return make_instance(
        instance_id=instance_id,
        url="http://10.0.0.1:8000",
        role=ROLES[instance_id[0]],
        instance_class=LLAMA_8B_H100,
        protocol="vllm-nixl",
        ranks=ranks,
        location=location,
        fetches_from_peers=True,
        streams_layers=instance_id.startswith("p"),
    )


def make_recorded(
    roles: str = "ppddm",
    policy: str = "slo",
    parameters: Mapping[str, str | int] | None = None,
    admission: str = "accept_all",
    pool_links: Sequence[PoolLink] = (),
) -> tuple[RecordedScheduler, Header, list[Frame]]:
    """The scheduler, the header of its recording, and the frames, which grow."""
    cluster = Cluster(Topology(pool_links=pool_links))
    for i, role in enumerate(roles):
        cluster.add(make_state(f"{role}{i}", ranks=1 + i % 2, location=f"s/z/r{i % 2}/n{i}"))
    scheduler = RecordedScheduler(
        cluster,
        CacheIndex(),
        make_policy(policy, parameters, seed=7),
        Objectives(ttft_s=0.5, tbt_s=0.05),
        SuspensionPolicy(after_failures=2, pause_s=2.0),
        aliases={"gpt-4": "llama"},
        gate=Gate(make_rule(admission)),
        id_prefix="t-",
    )
    frames: list[Frame] = []
    scheduler.record_to(frames.append)
    header = make_header(
        scheduler,
        RecordedPolicy(policy, dict(parameters or {}), 7),
        RecordedPolicy(admission),
        id_prefix="t-",
    )
    return scheduler, header, frames
