"""Where `conductor router` processes connect, in `conductor serve`."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AsyncExitStack

import structlog

from conductor.cli.background import keep_going
from conductor.cluster import Health
from conductor.config import Config
from conductor.configuration_faults import ConfigError
from conductor.front_door_config import FrontDoorConfig
from conductor.scheduler import Scheduler
from router.services import RouterServices
from router.workers.messages import Instances, KnownInstance, Setup
from router.workers.router_desk import RouterDesk

_log = structlog.get_logger(__name__)


async def open_router_desk(
    config: Config,
    services: RouterServices,
    tokenizers: Mapping[str, str],
    scheduler: Scheduler,
    rest_url: str,
    stack: AsyncExitStack,
) -> RouterDesk | None:
    """None where no routers are configured. Raises ConfigError for an address that cannot be had."""
    server = config.server
    if server.routers_port is None:
        return None
    assert server.admin_token is not None
    setup = Setup(
        services.settings,
        dict(tokenizers),
        config.routing.token_cache_bytes,
        None if services.keys is None else list(services.keys.keys),
        rest_url,
        FrontDoorConfig(
            cors=server.cors,
            tls=server.tls,
            engine_tls=config.routing.engine_tls,
            tracing=config.tracing,
        ).model_dump_json(),
    )
    token = server.admin_token.get_secret_value()
    desk = RouterDesk(services, setup, token, lambda: candidates(scheduler))
    try:
        port = await desk.listen(server.routers_host, server.routers_port)
    except OSError as error:
        raise ConfigError(
            f"server.routers_port: cannot listen on {server.routers_host}:{server.routers_port} "
            f"({error.strerror or error}); choose another one"
        ) from None
    stack.callback(desk.close)
    keep_going(stack, desk.tell_forever)
    _log.info("routers may connect", address=f"{server.routers_host}:{port}")
    return desk


def candidates(scheduler: Scheduler) -> Instances:
    """Who can take requests now."""
    return Instances(
        [
            KnownInstance(
                instance.role,
                [served.name for served in instance.facts.models],
                [rank.target for rank in instance.ranks],
            )
            for instance in scheduler.cluster
            if instance.facts is not None and instance.health in (Health.UP, Health.PROBING)
        ],
        scheduler.aliases,
    )
