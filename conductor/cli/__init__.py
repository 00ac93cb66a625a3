"""The command line: the composition root, the only place that imports from every package."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from conductor import __version__
from conductor.cli import config_command, emulate, index, replay, serve, warm
from conductor.config import ConfigError

__all__ = ["app", "main"]


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"conductor {__version__}")
        raise typer.Exit


app = typer.Typer(
    name="conductor",
    help=(
        "Global KV-cache-aware scheduler and router for LLM inference clusters.\n\n"
        "Start with [bold]conductor serve --emulate 2p2d[/bold]: an OpenAI-compatible front door on port 8000 over "
        "two prefill and two decode engines, emulated."
    ),
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    add_completion=True,
)


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    pass


app.command("serve")(serve.serve)
app.command("emulate")(emulate.emulate)
app.command("replay")(replay.replay)
app.command("index")(index.index)
app.command("config")(config_command.config)
app.command("warm")(warm.warm)


def main() -> None:
    """Console script: configuration errors are one line and exit code 2."""
    try:
        app()
    except ConfigError as error:
        print(f"conductor: {error}", file=sys.stderr)
        sys.exit(2)
