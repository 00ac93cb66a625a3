"""`conductor top`: a running conductor in the terminal, live."""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from conductor.cli.cache_client import CacheCommandError, ConductorClient
from conductor.cli.top_figures import Figures, look
from conductor.cli.top_frame import SORTS, frame, height

_TIMEOUT_S = 5.0
_KEYS = "q leaves, s sorts by the next column, space looks now"
_WIDE = 160  # columns, where the output is no terminal


def top(
    url: Annotated[str, typer.Option(help="The conductor's address.", envvar="CONDUCTOR_URL")] = (
        "http://127.0.0.1:8000"
    ),
    token: Annotated[
        str | None,
        typer.Option(
            help="An administrator's key, where keys are used.", envvar="CONDUCTOR_SERVER__ADMIN_TOKEN"
        ),
    ] = None,
    interval_s: Annotated[
        float, typer.Option("--interval-s", min=0.2, help="Between two looks, in seconds.")
    ] = 2.0,
    window_s: Annotated[
        float,
        typer.Option("--window-s", min=10, max=300, help="Rates and percentiles are of so many seconds."),
    ] = 120.0,
    sort: Annotated[str, typer.Option(help=f"What instances are ordered by: {', '.join(SORTS)}.")] = "name",
    once: Annotated[
        bool,
        typer.Option("--once", help="Print one frame with all instances; also where stdout is no terminal."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one look as JSON.")] = False,
) -> None:
    """The cluster live: load, queues and caches by instance, times, reuse, what is refused and what is wrong.

    Keys: q leaves, s sorts by the next column, space looks now. A server that is away is asked again and again.

      conductor top --url http://10.0.0.1:8000 --sort queue

      conductor top --once
    """
    if sort not in SORTS:
        raise typer.BadParameter(f"{sort!r} is none of {', '.join(SORTS)}", param_hint="--sort")
    client = ConductorClient(url, token, timeout_s=_TIMEOUT_S)
    terminal = sys.stdout.isatty()
    try:
        if as_json or once or not terminal:
            figures = look(client, window_s)
            if as_json:
                print(json.dumps(figures.document(), indent=2))
            else:
                Console(width=None if terminal else _WIDE).print(frame(figures, sort, None))
            return
    except CacheCommandError as error:
        Console(stderr=True).print(
            f"conductor top: {error}", style="red", markup=False, highlight=False, soft_wrap=True
        )
        raise typer.Exit(2) from None
    _Watch(client, url, interval_s, window_s, sort).run()


class _Watch:
    """The live view. What was heard last stays while the server is away."""

    def __init__(
        self, client: ConductorClient, url: str, interval_s: float, window_s: float, sort: str
    ) -> None:
        self._client = client
        self._url = url
        self._interval_s = interval_s
        self._window_s = window_s
        self._sort = sort
        self._figures: Figures | None = None
        self._fault: str | None = None
        self._leaving = False
        self._console = Console()

    def run(self) -> None:
        """Until q, Ctrl-C, or the end of the terminal."""
        before = signal.signal(signal.SIGINT, self._leave)
        try:
            with _keys() as read_key, Live(console=self._console, screen=True, auto_refresh=False) as live:
                live.update(Text(f"asking {self._url}", style="dim"), refresh=True)
                while not self._leaving:
                    self._look()
                    live.update(self._frame(), refresh=True)
                    until_s = time.monotonic() + self._interval_s
                    while (key := read_key(until_s - time.monotonic())) not in ("", " "):
                        if key == "q":
                            return
                        if key == "s":
                            names = list(SORTS)
                            self._sort = names[(names.index(self._sort) + 1) % len(names)]
                            live.update(self._frame(), refresh=True)
        except (KeyboardInterrupt, EOFError):
            return
        finally:
            signal.signal(signal.SIGINT, before)

    def _leave(self, *_: object) -> None:
        """Python drops an exception that comes while it finalizes something: then the next look does not begin."""
        self._leaving = True
        raise KeyboardInterrupt

    def _look(self) -> None:
        try:
            self._figures = look(self._client, self._window_s)
            self._fault = None
        except CacheCommandError as error:
            self._fault = str(error)

    def _frame(self) -> RenderableType:
        parts: list[RenderableType] = []
        if self._fault is not None:
            parts.append(Text(f"trying again: {self._fault}", style="bold red"))
        if self._figures is not None:
            room = max(self._console.height - height(self._figures) - len(parts), 1)
            note = f"{self._url}, every {self._interval_s:g} s, sorted by {self._sort}; {_KEYS}"
            parts.append(frame(self._figures, self._sort, room, note))
        return Group(*parts)


@contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """A function that waits so many seconds for a key; "" where none came. Nothing is echoed meanwhile."""
    if not sys.stdin.isatty():
        yield _no_keys
        return
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    tty.setcbreak(descriptor)
    try:
        yield _read_key
    finally:
        termios.tcsetattr(descriptor, termios.TCSANOW, before)


def _read_key(within_s: float) -> str:
    """Raises EOFError when the terminal is gone."""
    ready, _, _ = select.select([sys.stdin], [], [], max(within_s, 0.0))
    if not ready:
        return ""
    key = os.read(sys.stdin.fileno(), 1)  # unbuffered: what is read ahead would not be seen to wait
    if not key:
        raise EOFError
    return key.decode("latin-1")


def _no_keys(within_s: float) -> str:
    time.sleep(max(within_s, 0.0))
    return ""
