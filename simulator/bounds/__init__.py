"""How good any scheduler could be at best, on a given workload and cluster."""

from simulator.bounds.bound import Bounds, bounds
from simulator.bounds.optimum import optimal_in_time, optimal_mean_ttft_s
from simulator.bounds.waiting import Argument

__all__ = ["Argument", "Bounds", "bounds", "optimal_in_time", "optimal_mean_ttft_s"]
