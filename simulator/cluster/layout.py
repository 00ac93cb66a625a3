"""Which instances a simulated cluster has, and the scheduler that sees them as it would see real ones."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from cache_index import CacheIndex, Namespace
from conductor.cluster import Cluster, EngineFacts, ServedModel, make_instance
from conductor.costs import InstanceClass
from conductor.placement import Objectives, Role
from conductor.policies import Policy
from conductor.scheduler import Scheduler, SuspensionPolicy
from simulator.cluster.workload import BLOCK_TOKENS

MODEL = "simulated"
NAMESPACE = Namespace(MODEL, BLOCK_TOKENS)
_RECORDS = 256  # placements are not asked about afterwards


@dataclass(frozen=True, slots=True)
class Layout:
    """Numbers of instances, all of one class; ``blocks`` of `BLOCK_TOKENS` tokens fit each one's memory."""

    instance_class: InstanceClass
    mixed: int = 0
    prefill: int = 0
    decode: int = 0
    blocks: int = 0  # 0: what the class holds

    @property
    def capacity_blocks(self) -> int:
        return self.blocks or self.instance_class.kv_capacity_tokens // BLOCK_TOKENS

    def instances(self) -> Iterator[tuple[str, Role]]:
        """Names and roles."""
        for role, count, letter in (
            (Role.PREFILL, self.prefill, "p"),
            (Role.DECODE, self.decode, "d"),
            (Role.MIXED, self.mixed, "m"),
        ):
            yield from ((f"{letter}{number}", role) for number in range(count))


def read_layout(text: str, instance_class: InstanceClass, blocks: int = 0) -> Layout:
    """``8`` for eight mixed instances, ``4p4d`` for four that prefill and four that decode.

    Raises ValueError saying what was expected.
    """
    mixed = re.fullmatch(r"(\d+)", text)
    pair = re.fullmatch(r"(\d+)p(\d+)d", text)
    if mixed and int(mixed[1]):
        return Layout(instance_class, mixed=int(mixed[1]), blocks=blocks)
    if pair and int(pair[1]) and int(pair[2]):
        return Layout(instance_class, prefill=int(pair[1]), decode=int(pair[2]), blocks=blocks)
    raise ValueError(f"cluster {text!r} is neither a number of mixed instances (8) nor a split such as 4p4d")


def make_scheduler(layout: Layout, policy: Policy, objectives: Objectives) -> Scheduler:
    """The scheduler of a cluster whose engines are all up, and say what they cache."""
    cluster = Cluster()
    for number, (name, role) in enumerate(layout.instances()):
        cluster.add(
            make_instance(
                instance_id=name,
                url=f"http://10.{number >> 16 & 255}.{number >> 8 & 255}.{number & 255}:8000",
                role=role,
                instance_class=layout.instance_class,
                protocol="vllm-nixl",
            )
        )
    scheduler = Scheduler(cluster, CacheIndex(), policy, objectives, SuspensionPolicy(), records=_RECORDS)
    facts = EngineFacts(
        (ServedModel(MODEL),),
        block_size=BLOCK_TOKENS,
        kv_capacity_blocks=layout.capacity_blocks,
        publishes_events=True,
    )
    for name, _ in layout.instances():
        scheduler.instance_up(name, facts)
    return scheduler
