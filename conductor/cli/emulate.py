"""`conductor emulate`: emulated engines alone, for other routers or a configuration of one's own."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer
import yaml
from rich.console import Console

from conductor.cli.emulation import EmulatedCluster
from conductor.cli.logs import configure_logs
from conductor.cli.stop_signals import on_stop_signal
from conductor.config import Config, load_config


def emulate(
    cluster: Annotated[str, typer.Argument(help="2p2d: prefill and decode engines; 4: mixed ones.")] = "2p2d",
    base_port: Annotated[int, typer.Option(help="First of the HTTP, event and replay ports.")] = 8100,
    model: Annotated[str, typer.Option(help="Model name the engines serve.")] = "emulated-8b",
    speed: Annotated[float, typer.Option(help="How many times faster than the emulated hardware.")] = 1.0,
) -> None:
    """Run emulated vLLM-like engines: HTTP, real KV events over ZMQ, prefill/decode hand-off.

    Prints the `instances:` section that `conductor serve --config` needs to route over them.
    """
    flags = {"emulation": {"cluster": cluster, "base_port": base_port, "model": model, "speed": speed}}
    config = load_config(flags=flags)
    configure_logs(config.log.level, config.log.format)
    asyncio.run(_run(config))


async def _run(config: Config) -> None:
    engines = EmulatedCluster(config.emulation, log_level=config.log.level)
    stop = asyncio.Event()
    on_stop_signal(stop.set)
    await engines.start()
    try:
        sections = [{"id": i.id, "url": i.url, "role": str(i.role)} for i in engines.instances()]
        print(yaml.safe_dump({"instances": sections}, sort_keys=False), end="", flush=True)
        Console(stderr=True).print("[green]engines are starting[/green]; Ctrl-C stops them")
        await stop.wait()
    finally:
        await engines.stop()
