"""The command line: the composition root, the only place that imports from every package."""

from __future__ import annotations

import importlib
import inspect
import sys
from typing import Annotated, Any

import typer

from conductor import __version__
from conductor.cli.start_up import without_collections

__all__ = ["app", "main"]

app: typer.Typer  # made when it is asked for
_COMMANDS = {
    "serve": "serve",
    "router": "router",
    "emulate": "emulate",
    "replay": "replay",
    "sweep": "sweep",
    "experiment": "experiment",
    "report": "report",
    "trace": "trace",
    "plan": "plan",
    "index": "index",
    "top": "top",
    "cache": "cache",
    "register": "register",
    "config": "config_command",
    "warm": "warm",
}  # and the modules that they are in: a command starts sooner without what the others import


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"conductor {__version__}")
        raise typer.Exit


def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    pass


def _make_app(commands: list[str]) -> typer.Typer:
    made = typer.Typer(
        name="conductor",
        help=(
            "Global KV-cache-aware scheduler and router for LLM inference clusters.\n\n"
            "Start with [bold]conductor serve --emulate 2p2d[/bold]: an OpenAI-compatible front door on port 8000 "
            "over two prefill and two decode engines, emulated."
        ),
        no_args_is_help=True,
        rich_markup_mode="rich",
        pretty_exceptions_enable=False,
        add_completion=True,
    )
    made.callback()(_options)
    for command in commands:
        module = importlib.import_module(f"conductor.cli.{_COMMANDS[command]}")
        body = getattr(module, command)
        if isinstance(body, typer.Typer):
            made.add_typer(body, name=command)
        else:
            made.command(command)(body)
    _let_help_flow(made)
    return made


def _let_help_flow(commands: typer.Typer) -> None:
    """Paragraphs of help as wide as the terminal: Typer keeps the line ends of docstrings."""
    for command in commands.registered_commands:
        paragraphs = (inspect.getdoc(command.callback) or "").split("\n\n")
        command.help = "\n\n".join(" ".join(each.split("\n")) for each in paragraphs)
    for group in commands.registered_groups:
        if group.typer_instance is not None:
            _let_help_flow(group.typer_instance)


def __getattr__(name: str) -> Any:
    if name == "app":
        return _make_app(list(_COMMANDS))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def main() -> None:
    """Console script: configuration errors are one line and exit code 2, Ctrl-C while it starts is one and 130."""
    try:
        _run(sys.argv[1:])
    except KeyboardInterrupt:
        print("conductor: interrupted", file=sys.stderr)
        sys.exit(130)


def _run(arguments: list[str]) -> None:
    commands = [argument for argument in arguments[:1] if argument in _COMMANDS]
    if not commands and arguments != ["--version"]:
        commands = list(_COMMANDS)
    with without_collections():
        made = _make_app(commands)
        from conductor.configuration_faults import ConfigError
    try:
        made()
    except ConfigError as error:
        print(f"conductor: {error}", file=sys.stderr)
        sys.exit(2)
