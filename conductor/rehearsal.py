"""A placement on a cluster that is not there, so that the first real one need not wait for compilers."""

from __future__ import annotations

import importlib

import numpy as np

from cache_index import CacheIndex
from conductor.admission import Gate, make_rule
from conductor.catalogue import LLAMA_8B_H100
from conductor.circuit import SuspensionPolicy
from conductor.cluster import Cluster, EngineFacts, ServedModel, make_instance
from conductor.placement import Objectives, PlacementRequest, Role, Usage
from conductor.policies import make_policy
from conductor.reuse import ReuseModel
from conductor.scheduler import Scheduler


def rehearse_reuse() -> None:
    """The same of what a tier planner learns, and its solver imported."""
    importlib.import_module("ortools.sat.python.cp_model")
    model, prompt = ReuseModel(16, accesses=128), np.arange(1, 5, dtype=np.uint64)
    model.observe(prompt, 0.0)
    model.observe_all(prompt, np.array([len(prompt)]), np.zeros(1), np.zeros(1, np.int64))
    model.reuse_probabilities(prompt, 2.0, 1.0)
    model.retention_values(prompt, 1.0)
    model.expected_return(prompt, 1.0)


def rehearse() -> None:
    """Run every compiled kernel of a decision once: seconds on a new machine, milliseconds from the cache."""
    cluster = Cluster()
    for role in Role:
        cluster.add(
            make_instance(
                instance_id=role,
                url="http://127.0.0.1:1",
                role=role,
                instance_class=LLAMA_8B_H100,
                protocol="vllm-nixl",
                fetches_from_peers=True,
            )
        )
    gate = Gate(make_rule("predicted"))
    scheduler = Scheduler(
        cluster, CacheIndex(), make_policy("slo"), Objectives(), SuspensionPolicy(), gate=gate
    )
    for role in Role:
        scheduler.instance_up(role, EngineFacts((ServedModel("m"),), block_size=16, publishes_events=True))
    tokens = np.arange(1024, dtype=np.uint32)
    for number in range(2):
        placement = scheduler.place(PlacementRequest(f"r{number}", "m", tokens, len(tokens)), 0.0)
        scheduler.first_token(placement.placement_id, 0.5)
        scheduler.finished(placement.placement_id, 1.0, Usage(len(tokens), 16, 0))
