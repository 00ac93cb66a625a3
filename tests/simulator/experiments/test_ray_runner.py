"""The same points on a Ray cluster."""

from __future__ import annotations

import importlib.util
import sys

import pytest
from simulated_points import small_points

from conductor.configuration_faults import ConfigError
from simulator.experiments.ray_runner import on_ray
from simulator.experiments.runs import in_this_process, run_points

INSTALLED = importlib.util.find_spec("ray") is not None


def test_without_ray_the_remedy_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install 'kv-conductor\[ray\]'"):
        on_ray("auto")


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore")  # Ray's own
@pytest.mark.skipif(not INSTALLED, reason="ray is not installed: pip install 'kv-conductor[ray]'")
def test_a_local_cluster_gives_the_same_figures() -> None:
    points = small_points(rates=(5.0,))
    assert run_points(points, on_ray("local")) == run_points(points, in_this_process)
