"""``python -m simulator.emulator``: one emulated engine process."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import structlog
import uvicorn
import uvloop
import zmq

from simulator.emulator.publisher import EventEncoding, EventFormat, HashEncoding
from simulator.emulator.server import EmulatedEngine, EmulatorConfig
from simulator.emulator.tokens import TOKENIZER_FOLDER
from simulator.engine import EngineLimits
from simulator.performance import DEFAULT_PROFILE, PROFILES

PARENT_POLL_S: Final = 0.2
DRAIN_S: Final = 1

log: Any = structlog.get_logger("emulator")


def arguments() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m simulator.emulator", description=__doc__)
    add = parser.add_argument
    add("--host", default="127.0.0.1")
    add("--port", type=int, required=True)
    add("--instance-id", default="engine-0")
    add("--role", choices=("prefill", "decode", "mixed"), default="mixed")
    add("--model", required=True, help="the name clients ask for")
    add("--tokenizer", type=Path, default=TOKENIZER_FOLDER, help="folder with tokenizer.json and its config")
    add("--kv-event-port", type=int, help="ZMQ PUB of KV events; without it none are published")
    add("--kv-replay-port", type=int, help="ZMQ ROUTER that replays them")
    add("--replay-buffer-steps", type=int, default=10_000)
    add("--event-encoding", type=EventEncoding, choices=list(EventEncoding), default=EventEncoding.MAP)
    add("--hash-encoding", type=HashEncoding, choices=list(HashEncoding), default=HashEncoding.INT)
    add("--batch-removals", action="store_true", help="one BlockRemoved per step instead of one per block")
    add("--block-size", type=int, default=16, help="tokens per KV block")
    add("--kv-blocks", type=int, default=28_000)
    add("--host-blocks", type=int, default=0, help="KV blocks of a host tier, written through; 0 is none")
    add("--max-model-len", type=int, help="default: 131072, or what fits the KV blocks")
    add("--max-num-seqs", type=int, default=256)
    add("--max-num-batched-tokens", type=int, default=8192)
    add("--profile", choices=sorted(PROFILES), default=DEFAULT_PROFILE.name, help="model and GPU emulated")
    add("--speed", type=float, default=1.0, help="divides every emulated duration")
    add("--dp-size", type=int, default=1, help="data-parallel ranks; KV ports are offset by rank")
    add("--kv-bandwidth-gbps", type=float, default=200.0, help="hand-off link of this instance, in Gbit/s")
    add("--advertised-host", help="where decode instances reach this one; default: --host")
    add("--lease-s", type=float, default=30.0, help="how long prefilled blocks wait for their decode")
    add("--pull-timeout-s", type=float, default=5.0, help="until a lost prefill fails the request")
    add("--hang-on-lost-prefill", action="store_true", help="never answer when the prefill is lost")
    add("--hand-off", choices=("vllm-nixl", "sglang"), default="vllm-nixl", help="whose protocol")
    add("--bootstrap-port", type=int, help="of a prefill engine with SGLang's hand-off")
    add("--room-timeout-s", type=float, default=30.0, help="until an empty room fails the request")
    add("--log-level", choices=("debug", "info", "warning", "error"), default="info")
    add("--parent-pid", type=int, help="stop when this process is no longer the parent")
    return parser


def config_from(options: argparse.Namespace) -> EmulatorConfig:
    """The configuration these options mean; ValueError if they contradict each other."""
    return EmulatorConfig(
        host=options.host,
        port=options.port,
        advertised_host=options.advertised_host,
        instance_id=options.instance_id,
        role=options.role,
        model=options.model,
        tokenizer_folder=options.tokenizer,
        kv_event_port=options.kv_event_port,
        kv_replay_port=options.kv_replay_port,
        replay_buffer_steps=options.replay_buffer_steps,
        event_format=EventFormat(options.event_encoding, options.hash_encoding),
        batch_removals=options.batch_removals,
        block_size=options.block_size,
        kv_blocks=options.kv_blocks,
        host_blocks=options.host_blocks,
        max_model_len=options.max_model_len,
        limits=EngineLimits(options.max_num_batched_tokens, options.max_num_seqs, options.lease_s),
        performance=PROFILES[options.profile].at_speed(options.speed),
        dp_size=options.dp_size,
        kv_bandwidth_gbps=options.kv_bandwidth_gbps,
        pull_timeout_s=options.pull_timeout_s,
        hang_on_lost_prefill=options.hang_on_lost_prefill,
        hand_off=options.hand_off,
        bootstrap_port=options.bootstrap_port,
        room_timeout_s=options.room_timeout_s,
    )


class Server(uvicorn.Server):
    """uvicorn without its signal handling, which would end the process by the signal instead of with 0."""

    exit_code = 0

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop, signal.Signals(number).name)
        yield

    def stop(self, reason: str) -> None:
        """Accept nothing more, give running requests a moment, end."""
        log.info("stopping", reason=reason)
        self.should_exit = True

    def die(self, message: str | None, error: BaseException | None) -> None:
        """Stop because of a bug; the process ends with 1."""
        log.error("unexpected error", message=message, error=repr(error), exc_info=error)
        self.exit_code = 1
        self.stop("an internal error")


async def serve(config: EmulatorConfig, parent_pid: int | None) -> int:
    """Run until a signal, or until the parent is gone; the exit code."""
    engine = EmulatedEngine(config)
    server = Server(
        uvicorn.Config(
            engine.app,
            host=config.host,
            port=config.port,
            loop="uvloop",
            http="httptools",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            backlog=4096,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=DRAIN_S,
        )
    )
    asyncio.get_running_loop().set_exception_handler(
        lambda loop, context: server.die(context.get("message"), context.get("exception"))
    )
    watch = asyncio.create_task(_watch_parent(parent_pid, server)) if parent_pid else None
    async with engine.running():
        log.info("starting", instance_id=config.instance_id, role=config.role, port=config.port)
        await server.serve()
    if watch is not None:
        watch.cancel()
    return server.exit_code


async def _watch_parent(parent_pid: int, server: Server) -> None:
    while os.getppid() == parent_pid:
        await asyncio.sleep(PARENT_POLL_S)
    server.stop("the parent process is gone")


def _log_to_stderr(level: str) -> None:
    """JSON lines, also for what libraries log."""
    shared: list[Any] = [
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso"),
        structlog.processors.format_exc_info,
    ]
    render = structlog.processors.JSONRenderer()
    structlog.configure(
        processors=[*shared, render],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, render],
        )
    )
    logging.basicConfig(level=logging.WARNING, handlers=[handler])


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments()
    options = parser.parse_args(argv)
    try:
        config = config_from(options)
    except ValueError as error:
        parser.error(str(error))
    _log_to_stderr(options.log_level)
    try:
        exit_code = uvloop.run(serve(config, options.parent_pid))
    except (OSError, zmq.ZMQError) as error:
        log.error("cannot start", error=str(error))
        exit_code = 1
    sys.exit(exit_code)


if __name__ == "__main__":
    main()
