"""Points on a Ray cluster: each is a task, and each workload is sent there once."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterator, Sequence
from typing import Any

from conductor.configuration_faults import ConfigError
from simulator.experiments.point import Figures, Point
from simulator.experiments.runs import Runner, run_point
from simulator.experiments.workload import Workload, records_once


def on_ray(address: str) -> Runner:
    """``auto`` is the cluster that this machine belongs to, ``local`` a new one of this machine alone.

    Raises ConfigError without Ray, or when there is no cluster at that address.
    """
    try:
        ray: Any = importlib.import_module("ray")
    except ImportError:
        raise ConfigError(
            "--ray needs Ray, which is not installed: pip install 'kv-conductor[ray]'"
        ) from None

    def run(points: Sequence[Point]) -> Iterator[tuple[int, Figures]]:
        try:
            ray.init(
                address=address, log_to_driver=False, logging_level=logging.ERROR, include_dashboard=False
            )
        except (ConnectionError, ValueError) as error:
            raise ConfigError(f"no Ray cluster at {address!r}: {error}") from None
        try:
            task = ray.remote(num_cpus=1)(run_point)
            workloads: dict[Workload, object] = {}
            numbers = {}
            for number, point in enumerate(points):
                if point.workload not in workloads:
                    workloads[point.workload] = ray.put(records_once(point.workload))
                numbers[task.remote(point, workloads[point.workload])] = number
            waiting = list(numbers)
            while waiting:
                ended, waiting = ray.wait(waiting)
                for reference in ended:
                    yield numbers[reference], ray.get(reference)
        finally:
            ray.shutdown()

    return run
