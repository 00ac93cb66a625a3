"""Whole clusters in virtual time, driven by the scheduler that serves real traffic."""

from simulator.cluster.layout import make_scheduler
from simulator.cluster.results import Outcome, RequestResult, Simulated, Timeline
from simulator.cluster.simulation import ClusterSimulation
from simulator.cluster.specification import ClusterSpec, InstanceSpec, Outage, PoolSpec, uniform
from simulator.cluster.workload import (
    BLOCK_TOKENS,
    Request,
    block_tokens_of,
    requests_of,
)

__all__ = [
    "BLOCK_TOKENS",
    "ClusterSimulation",
    "ClusterSpec",
    "InstanceSpec",
    "Outage",
    "Outcome",
    "PoolSpec",
    "Request",
    "RequestResult",
    "Simulated",
    "Timeline",
    "block_tokens_of",
    "make_scheduler",
    "requests_of",
    "uniform",
]
