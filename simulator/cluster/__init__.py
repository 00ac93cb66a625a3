"""Whole clusters in virtual time, driven by the scheduler that serves real traffic."""

from simulator.cluster.layout import Layout, make_scheduler, read_layout
from simulator.cluster.simulation import ClusterSimulation, Outcome, RequestResult, Simulated, Timeline
from simulator.cluster.specification import ClusterSpec, InstanceSpec, Outage, PoolSpec, uniform
from simulator.cluster.workload import BLOCK_TOKENS, Request, conversations, requests_of, reuse_bound

__all__ = [
    "BLOCK_TOKENS",
    "ClusterSimulation",
    "ClusterSpec",
    "InstanceSpec",
    "Layout",
    "Outage",
    "Outcome",
    "PoolSpec",
    "Request",
    "RequestResult",
    "Simulated",
    "Timeline",
    "conversations",
    "make_scheduler",
    "read_layout",
    "requests_of",
    "reuse_bound",
    "uniform",
]
