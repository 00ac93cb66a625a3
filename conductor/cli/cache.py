"""`conductor cache`: what a running conductor's instances have cached, and orders to change it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from conductor.cli.cache_client import CacheCommandError, ConductorClient, parse_place, parse_prompt
from conductor.cli.whole_tables import print_whole

cache = typer.Typer(
    help=(
        "Caches of a running cluster: who has a prompt, and orders to move, keep and drop it.\n\n"
        "A prompt is given as --text, --file or --tokens, a place as INSTANCE/TIER (prefill-0/host); LMCache's "
        "servers are lmcache:ID, a node of a Mooncake pool is POOL@SEGMENT. Orders run in the background: the "
        "answer is an action, `conductor cache actions` shows them all, and --wait waits for the end.\n\n"
        "  conductor cache lookup --text 'You are a helpful assistant.'\n\n"
        "  conductor cache prefetch prefill-0/host --file system_prompt.txt --wait"
    ),
    no_args_is_help=True,
    rich_markup_mode="rich",
)

_ENDED_WELL = "done"
_WHOLE = ("action", "kind", "state")  # columns that are copied, or short
Url = Annotated[str, typer.Option(help="The conductor's address.", envvar="CONDUCTOR_URL")]
Token = Annotated[
    str | None,
    typer.Option(help="An administrator's key, where keys are used.", envvar="CONDUCTOR_SERVER__ADMIN_TOKEN"),
]
Json = Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")]
Model = Annotated[str | None, typer.Option(help="Model of the prompt (default: the first that is served).")]
Text = Annotated[str | None, typer.Option(help="The prompt.")]
File = Annotated[Path | None, typer.Option(help="File with the prompt's text.")]
Tokens = Annotated[
    str | None, typer.Option(help="The prompt as token ids: 1,2,3, or @FILE with a JSON list.")
]
Salt = Annotated[str | None, typer.Option("--cache-salt", help="The requests' cache_salt.")]
Where = Annotated[str, typer.Argument(metavar="INSTANCE/TIER", help="The place: prefill-0/host.")]
Deadline = Annotated[float, typer.Option("--deadline-s", help="Give up after so many seconds.")]
Wait = Annotated[bool, typer.Option("--wait", help="Wait for the end; exit code 1 unless it is done.")]
DEFAULT_URL = "http://127.0.0.1:8000"


@contextmanager
def _told() -> Iterator[None]:
    """What is wrong as one line and exit code 2."""
    try:
        yield
    except CacheCommandError as error:
        Console(stderr=True).print(
            f"conductor cache: {error}", style="red", markup=False, highlight=False, soft_wrap=True
        )
        raise typer.Exit(2) from None


@cache.command()
def lookup(
    url: Url = DEFAULT_URL,
    token: Token = None,
    model: Model = None,
    text: Text = None,
    file: File = None,
    tokens: Tokens = None,
    cache_salt: Salt = None,
    as_json: Json = False,
) -> None:
    """Who has how much of a prompt. Counts are tokens, and cumulative over the tiers.

    conductor cache lookup --text 'You are a helpful assistant.'
    """
    with _told():
        client = ConductorClient(url, token)
        prompt = parse_prompt(text, file, tokens)
        if not prompt:
            raise CacheCommandError("give a prompt: --text, --file or --tokens")
        asked = model or client.first_model()
        ids = prompt.get("token_ids") or client.token_ids(asked, prompt["text"])
        body = {"model": asked, "token_ids": ids, "cache_salt": cache_salt}
        answer = client.post("/v1/cache/lookup", body)
        if as_json:
            _print_json(answer)
            return
        table = _table(
            f"{asked}: {len(ids)} tokens", ("instance", "rank"), ("device", "+ host", "+ all tiers")
        )
        for found in answer.values():
            for instance, counts in found.items():
                ranks = ", ".join(counts["DP"])
                table.add_row(instance, ranks, *(str(counts[tier]) for tier in ("GPU", "CPU", "DISK")))
        Console().print(table)


@cache.command()
def prefetch(
    target: Where,
    source: Annotated[
        str | None, typer.Option(metavar="INSTANCE/TIER", help="From there (default: who has most of it).")
    ] = None,
    url: Url = DEFAULT_URL,
    token: Token = None,
    model: Model = None,
    text: Text = None,
    file: File = None,
    tokens: Tokens = None,
    cache_salt: Salt = None,
    deadline_s: Deadline = 60.0,
    wait: Wait = False,
    as_json: Json = False,
) -> None:
    """Bring a prompt's cache to a tier before a request needs it.

    conductor cache prefetch prefill-0/host --file system_prompt.txt --wait
    """
    more = {} if source is None else {"source": (source, "--source")}
    prompt = (model, text, file, tokens, cache_salt)
    _order("prefetch", target, url, token, prompt, deadline_s, wait, as_json, places=more)


@cache.command()
def move(
    source: Annotated[str, typer.Argument(metavar="SOURCE/TIER", help="Where it is: prefill-0/host.")],
    target: Annotated[str, typer.Argument(metavar="TARGET/TIER", help="Where it is to be: prefill-1/host.")],
    copy: Annotated[bool, typer.Option("--copy", help="The source keeps its own.")] = False,
    url: Url = DEFAULT_URL,
    token: Token = None,
    model: Model = None,
    text: Text = None,
    file: File = None,
    tokens: Tokens = None,
    cache_salt: Salt = None,
    deadline_s: Deadline = 60.0,
    wait: Wait = False,
    as_json: Json = False,
) -> None:
    """Move a prompt's cache to another place, or copy it there.

    conductor cache move prefill-0/host prefill-1/host --copy --text 'You are a helpful assistant.'
    """
    prompt = (model, text, file, tokens, cache_salt)
    places = {"source": (source, "SOURCE/TIER")}
    _order("move", target, url, token, prompt, deadline_s, wait, as_json, places=places, copy=copy)


def _at_one_place(verb: str, effect: str, example: str, *, prompt_optional: bool = False) -> None:
    def command(
        target: Where,
        url: Url = DEFAULT_URL,
        token: Token = None,
        model: Model = None,
        text: Text = None,
        file: File = None,
        tokens: Tokens = None,
        cache_salt: Salt = None,
        deadline_s: Deadline = 60.0,
        wait: Wait = False,
        as_json: Json = False,
    ) -> None:
        prompt = (model, text, file, tokens, cache_salt)
        _order(verb, target, url, token, prompt, deadline_s, wait, as_json, prompt_optional=prompt_optional)

    cache.command(verb, help=f"{effect}\n\n  conductor cache {verb} {example}")(command)


_at_one_place(
    "pin", "Keep a prompt's cache in a tier: it is not evicted.", "prefill-0/host --file system_prompt.txt"
)
_at_one_place(
    "unpin", "Let a pinned prompt's cache be evicted again.", "prefill-0/host --file system_prompt.txt"
)
_at_one_place(
    "compress",
    "Compress a prompt's cache where it is (LMCache's controller does).",
    "engine-0/host --file report.txt",
)
_at_one_place("decompress", "Decompress a prompt's cache where it is.", "engine-0/host --file report.txt")
_at_one_place(
    "clear",
    "Drop a prompt's cache from a tier; without a prompt, everything that lies there.",
    "prefill-0/host --text 'You are a helpful assistant.'",
    prompt_optional=True,
)


@cache.command()
def actions(
    state: Annotated[
        str | None, typer.Option(help="planned, running, done, failed, abandoned or cancelled.")
    ] = None,
    limit: Annotated[int, typer.Option(help="How many at most.")] = 20,
    url: Url = DEFAULT_URL,
    token: Token = None,
    as_json: Json = False,
) -> None:
    """What was ordered and what the planner does: running first, then planned, then ended.

    conductor cache actions --state failed
    """
    with _told():
        answer = ConductorClient(url, token).get("/v1/actions", state=state, limit=limit)
        if as_json:
            _print_json(answer)
        else:
            _show(answer["actions"])


@cache.command()
def cancel(
    action_id: Annotated[str, typer.Argument(metavar="ACTION", help="An id of `conductor cache actions`.")],
    url: Url = DEFAULT_URL,
    token: Token = None,
    as_json: Json = False,
) -> None:
    """Cancel an action; what a store has begun it may finish all the same.

    conductor cache cancel 3f2a90c1-order-7
    """
    with _told():
        answer = ConductorClient(url, token).post(f"/v1/actions/{action_id}/cancel")
        if as_json:
            _print_json(answer)
        else:
            _show([answer])


def _order(
    verb: str,
    target: str,
    url: str,
    token: str | None,
    prompt: tuple[str | None, str | None, Path | None, str | None, str | None],
    deadline_s: float,
    wait: bool,
    as_json: bool,
    *,
    places: dict[str, tuple[str, str]] | None = None,
    prompt_optional: bool = False,
    **more: Any,
) -> None:
    model, text, file, tokens, cache_salt = prompt
    with _told():
        body = {"target": parse_place(target, "INSTANCE/TIER"), "deadline_s": deadline_s, **more}
        for name, (written, option) in (places or {}).items():
            body[name] = parse_place(written, option)
        body |= (given := parse_prompt(text, file, tokens))
        if not given and not prompt_optional:
            raise CacheCommandError("give a prompt: --text, --file or --tokens")
        if cache_salt is not None:
            body["cache_salt"] = cache_salt
        client = ConductorClient(url, token)
        body |= {"model": model or client.first_model(), "reason": f"conductor cache {verb}"}
        taken = client.post(f"/v1/cache/{verb}", body)["actions"]
        if wait:
            taken = [client.ended(action) for action in taken]
        if as_json:
            _print_json({"actions": taken})
        else:
            _show(taken)
    if wait and any(action["state"] != _ENDED_WELL for action in taken):
        raise typer.Exit(1)


def _show(found: list[dict[str, Any]]) -> None:
    table = _table("", ("action", "kind", "from", "to", "state"), ("blocks", "MB"))
    table.show_edge = False  # fits 80 columns
    for action in found:
        source = action["source"]
        blocks = action["stop_block"] - action["start_block"]
        table.add_row(
            action["id"],
            action["kind"],
            "" if source is None else f"{source['instance']}/{source['tier']}",
            f"{action['target']['instance']}/{action['target']['tier']}",
            "partial" if action["partial"] else action["state"],
            f"{action['blocks_done']}/{blocks}" if blocks else "all",
            f"{action['kv_bytes'] / 1e6:,.1f}",
        )
    out = Console()
    print_whole(out, table)
    for action in found:
        if action["detail"]:
            took = "" if action["ran_s"] is None else f" (after {action['ran_s']:.2f} s)"
            text = f"{action['id']}: {action['detail']}{took}"
            out.print(text, markup=False, highlight=False, soft_wrap=True)


def _table(title: str, texts: tuple[str, ...], numbers: tuple[str, ...]) -> Table:
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in texts:
        table.add_column(heading, overflow="fold", no_wrap=heading in _WHOLE)
    for heading in numbers:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _print_json(answer: dict[str, Any]) -> None:
    print(json.dumps(answer, indent=2))
