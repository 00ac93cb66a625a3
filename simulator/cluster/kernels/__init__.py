"""The compiled engine model: state as arrays (`layout`), and what its driver calls."""

from functools import cache

from simulator.cluster.kernels.compilation import KERNELS
from simulator.cluster.kernels.copies import copy, discard, pin, unpin
from simulator.cluster.kernels.giving_up import drop, kill
from simulator.cluster.kernels.progress import advance, hand_on, submit
from simulator.cluster.kernels.telling import drain, read_gauges

__all__ = [
    "advance",
    "compile_all",
    "copy",
    "discard",
    "drain",
    "drop",
    "hand_on",
    "kill",
    "pin",
    "read_gauges",
    "submit",
    "unpin",
]


@cache
def compile_all() -> None:
    """Compile the kernels, or load them from the cache; does nothing when called again."""
    KERNELS.compile_all()
