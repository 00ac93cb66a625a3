"""Configuration of executors and of what tier actions may take."""

from pathlib import Path

import pytest

from conductor.config import Config, load_config
from conductor.configuration_faults import ConfigError
from conductor.link_budgets import Direction, Link, LinkBudget

EXAMPLE = """
instances:
  - {id: e0, url: "http://10.0.0.1:8000"}
  - {id: e1, url: "http://10.0.0.2:8000"}
shared_pools:
  - id: pool-0
    mooncake: {endpoint: "tcp://10.0.0.9:5557", model: m, block_size: 16, admin_endpoint: "http://10.0.0.9:9003"}
executors:
  lmcache_servers: {}
  lmcache_controller: {url: "http://10.0.0.8:9000", instances: {e0: lm0}}
  mooncake: {pool-0: {}}
tiers:
  budget: {bytes_per_s: 1.0e+9, burst_bytes: 5.0e+8}
  budgets:
    - {instance: e1, direction: in, concurrent_bytes: 2.0e+9}
  capacities:
    - {instance: e0, tier: host, bytes: 1.0e+11}
  max_running: 8
"""


def read(tmp_path: Path, text: str) -> Config:
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    return load_config(path)


def test_budgets_and_limits(tmp_path: Path) -> None:
    tiers = read(tmp_path, EXAMPLE).tiers
    budgets = tiers.link_budgets()
    assert budgets.budget(Link("e0", Direction.IN)) == LinkBudget(1e9, 5e8)
    assert budgets.budget(Link("e1", Direction.IN)) == LinkBudget(concurrent_bytes=2e9)
    assert tiers.limits().max_running == 8


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("pool-0: {}", "pool-1: {}", "'pool-1' is none of the shared_pools"),
        (', admin_endpoint: "http://10.0.0.9:9003"', "", "executors.mooncake.pool-0.admin_url is required"),
        ("{e0: lm0}", "{e9: lm0}", "'e9' is none of the instances"),
        ("{e0: lm0}", "{}", "executors.lmcache_controller.instances"),
        ("lmcache_servers: {}", "emulated: [e7]", "'e7' is none of the instances"),
        ("pool-0: {}", 'pool-0: {key_format: "key"}', "must have one place for a number"),
        ("direction: in", "direction: sideways", "direction"),
        ("budgets:", "budgets:\n    - {instance: e1, direction: in}", "listed more than once"),
        ("tier: host", "tier: attic", "tier"),
        ("max_running: 8", "max_running: 0", "max_running"),
    ],
)
def test_mistakes_are_explained(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in EXAMPLE
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, EXAMPLE.replace(old, new))
