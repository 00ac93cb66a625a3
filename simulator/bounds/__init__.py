"""How good any scheduler could be at best, on a given workload and cluster.

`simulator.bounds.optimum` has true optima of a few requests; its solver is imported with it only.
"""

from simulator.bounds.bound import Bounds, bounds
from simulator.bounds.waiting import Argument

__all__ = ["Argument", "Bounds", "bounds"]
