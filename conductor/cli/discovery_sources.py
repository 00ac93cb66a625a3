"""The sources of instances that the configuration asks for, as `conductor serve` runs them."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import AsyncExitStack

from conductor.cli.background import keep_going
from conductor.discovery.discovered import Discovered
from conductor.discovery.instance_file import WatchedInstanceFile
from conductor.discovery_config import DiscoveryConfig


async def start_discovery(
    config: DiscoveryConfig, discovered: Discovered, clock: Callable[[], float], stack: AsyncExitStack
) -> None:
    """Follow every source until the stack is closed. Raises ConfigError for one that cannot even be tried."""
    keep_going(stack, discovered.registrations.expire_forever)
    if config.file is not None:
        file = WatchedInstanceFile(config.file.path, discovered.roll, check_s=config.file.check_s)
        file.check()
        keep_going(stack, file.check_forever)
    if config.kubernetes is not None:
        # Its client takes most of a second to import, which only those pay who use it.
        from conductor.discovery.kubernetes.api import PodApi
        from conductor.discovery.kubernetes.watching import KubernetesPods

        api = await stack.enter_async_context(await PodApi.connect(config.kubernetes))
        pods = KubernetesPods(config.kubernetes, api, discovered.roll, clock=clock, draw=random.Random())
        keep_going(stack, pods.follow)
