"""Which version runs, as a metric: rollouts are seen, and alerts and dashboards can be joined with it."""

from __future__ import annotations

import platform
from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from conductor import __version__


class BuildCollector(Collector):
    """Always 1; the version is in the labels."""

    def collect(self) -> Iterator[Metric]:
        build = GaugeMetricFamily(
            "conductor_build_info", "1; the version in the labels", labels=["version", "python"]
        )
        build.add_metric([__version__, platform.python_version()], 1)
        yield build
