"""What the router needs besides connections, as the configuration asks for it."""

from __future__ import annotations

import os
import ssl
from collections.abc import Callable, Mapping

import httpx

from conductor.cli.access import make_key_ring
from conductor.cli.emulation import EmulatedCluster
from conductor.cli.front_door_options import cors_policy
from conductor.config import Config
from conductor.configuration_faults import ConfigError
from conductor.dispatcher import Dispatcher
from conductor.scheduler import Scheduler
from router import EngineTokenizer, RouterMetrics, RouterServices, RouterSettings, TokenService
from router.tokenizer_folders import load_tokenizers
from simulator.emulator.tokens import TOKENIZER_FOLDER


def tokenizer_folders(config: Config, emulated: EmulatedCluster | None) -> dict[str, str]:
    """By every name that a model is asked for by."""
    folders = {model.name: model.tokenizer for model in config.models if model.tokenizer is not None}
    if emulated is not None:
        folders.setdefault(config.emulation.model, TOKENIZER_FOLDER)
    for model in config.models:
        if model.name in folders:
            folders |= dict.fromkeys(model.aliases, folders[model.name])
    return {name: str(folder) for name, folder in folders.items()}


def make_services(
    config: Config,
    scheduler: Scheduler,
    dispatcher: Dispatcher,
    client: httpx.AsyncClient,
    clock: Callable[[], float],
    tokenizers: Mapping[str, str],
    to_engines: ssl.SSLContext,
) -> RouterServices:
    """Raises ConfigError for a tokenizer that cannot be loaded, and for keys."""
    try:
        loaded = load_tokenizers(tokenizers, cache_bytes=config.routing.token_cache_bytes)
    except ValueError as error:
        raise ConfigError(f"models: {error}") from None

    async def engine_for(model: str) -> str | None:
        """Any instance that can tokenize for this model."""
        name = scheduler.aliases.get(model, model)
        now_s = clock()
        return next((i.url for i in scheduler.cluster if i.serves(name) and i.is_candidate(now_s)), None)

    metrics = RouterMetrics()
    return RouterServices(
        scheduler,
        dispatch=dispatcher,
        settings=RouterSettings(
            max_body_bytes=config.server.max_body_bytes,
            max_attempts=config.routing.max_attempts,
            retry_ratio=config.routing.retry_ratio,
            retry_burst=config.routing.retry_burst,
            hedge_quantile=config.routing.hedge_quantile,
            hedge_least_s=config.routing.hedge_least_s,
            connect_timeout_s=config.routing.connect_timeout_s,
            prefill_timeout_s=config.routing.prefill_timeout_s,
            transfer_timeout_s=config.routing.transfer_timeout_s,
            first_byte_timeout_s=config.routing.first_byte_timeout_s,
            pass_tokens=frozenset(
                name for model in config.models if model.pass_tokens for name in (model.name, *model.aliases)
            ),
            shutdown_timeout_s=int(config.server.shutdown_grace_s),
            log_requests=config.log.level in ("debug", "info"),
        ),
        tokens=TokenService(loaded, engine=EngineTokenizer(client, engine_for), metrics=metrics),
        metrics=metrics,
        keys=make_key_ring(config, os.environ),
        cors=cors_policy(config.server.cors),
        engine_tls=to_engines,
        clock=clock,
    )
