"""One frame of `conductor top`: the cluster's figures, what is wrong, and every instance by role."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from conductor.cli.top_figures import Figures

ROLES: Final = ("prefill", "decode", "mixed")
TIERS: Final = {"device": "blue", "host": "green", "disk": "yellow", "pod": "magenta", "remote": "cyan"}
UNKNOWN: Final = "-"
_HEALTH: Final = {
    "up": "green",
    "starting": "cyan",
    "draining": "cyan",
    "withheld": "cyan",
    "down": "bold red",
}
_FULL_QUEUE_MS: Final = 2_000.0
_MOST_PROBLEMS: Final = 3
_NEARLY_ALL: Final = 0.95
_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")

Row = Mapping[str, Any]
SORTS: Final[dict[str, Callable[[Row], Any]]] = {
    "name": lambda row: row["id"],
    "kv": lambda row: -(row["kv_usage"] or 0.0),
    "queue": lambda row: -row["queue_ms"],
    "requests": lambda row: -row["active_decodes"],
    "cached": lambda row: -sum(row[f"{tier}_blocks"] for tier in TIERS),
    "health": lambda row: (row["health"] == "up", row["health"]),
}  # by its name, what instances are ordered by


def frame(figures: Figures, sort: str, rows: int | None, note: str = "") -> RenderableType:
    """``rows`` are how many instances there is room for, None: all. ``note`` stands in the last line."""
    parts: list[RenderableType] = [_totals(figures.cluster, figures.actions)]
    parts += [_problem(problem) for problem in figures.problems[:_MOST_PROBLEMS]]
    if len(figures.problems) > _MOST_PROBLEMS:
        parts.append(Text(f"and {len(figures.problems) - _MOST_PROBLEMS} more problems", style="yellow"))
    groups = [
        (role, sorted((row for row in figures.instances if row["role"] == role), key=SORTS[sort]))
        for role in ROLES
    ]
    shown = [(role, listed) for role, listed in groups if listed]
    rooms = _shared([len(listed) for _, listed in shown], rows)
    parts += [_instances(role, listed, room) for (role, listed), room in zip(shown, rooms, strict=True)]
    if not shown:
        parts.append(Text("no instances", style="dim"))
    if note:
        parts.append(Text(note, style="dim", no_wrap=True, overflow="ellipsis"))
    return Group(*parts)


def height(figures: Figures) -> int:
    """Lines that a frame takes beside its instances."""
    roles = len({row["role"] for row in figures.instances})
    problems = min(len(figures.problems), _MOST_PROBLEMS) + (len(figures.problems) > _MOST_PROBLEMS)
    return 5 + problems + 5 * roles


def _shared(wanted: list[int], room: int | None) -> list[int]:
    """How many rows each group gets: no more than it wants, and none less than another that wants more."""
    if room is None or sum(wanted) <= room:
        return wanted
    given = [0] * len(wanted)
    left = max(room, len(wanted))
    while left > 0 and (wanting := [i for i, most in enumerate(wanted) if given[i] < most]):
        for i in wanting[:left]:
            given[i] += 1
        left -= len(wanting[:left])
    return given


def _totals(cluster: Mapping[str, Any], actions: Mapping[str, int]) -> Table:
    now, window, objectives = cluster["now"], cluster["window"], cluster["objectives"]
    instances = cluster["instances"]
    up = instances["by_health"].get("up", 0)
    table = Table.grid(padding=(0, 3))
    for _ in range(4):
        table.add_column(no_wrap=True, overflow="ellipsis")
    table.add_row(
        _fact("instances", f"{up} of {instances['total']} up"),
        _fact("requests", f"{_number(window['requests_per_s'])}/s, {now['active_placements']} under way"),
        _fact("good", f"{_percent(window['goodput_share'])}, {_number(window['goodput_per_s'])}/s"),
        _fact("refused", str(window["refused"]), "bold red" if window["refused"] else ""),
    )
    table.add_row(
        _fact("TTFT p50 p90 p99", _times(window, "ttft")),
        _fact("goal", _ms(objectives["ttft_ms"])),
        _fact("met", _percent(window["ttft_attainment"])),
        _fact("queue", f"{_ms(now['queue_mean_ms'])}, longest {_ms(now['queue_max_ms'])}"),
    )
    table.add_row(
        _fact("TBT  p50 p90 p99", _times(window, "tbt")),
        _fact("goal", _ms(objectives["tbt_ms"])),
        _fact("met", _percent(window["tbt_attainment"])),
        _fact("KV", f"{_percent(now['kv_usage_mean'])}, fullest {_percent(now['kv_usage_max'])}"),
    )
    reuse = _percent(window["token_reuse_planned"])
    moving = ", ".join(f"{actions.get(state, 0)} {state}" for state in ("planned", "running"))
    told, told_of = _percent(window["token_reuse_reported"]), window["token_reuse_reported_of"]
    if told_of is not None and told_of < _NEARLY_ALL:
        told += f" of {_percent(told_of)}"
    table.add_row(
        _fact("prompt tokens reused", reuse),
        _fact("engines say", told),
        _fact("policy", cluster["policy"]),
        _fact("actions", moving),
    )
    return table


def _fact(name: str, value: str, style: str = "") -> Text:
    return Text.assemble((f"{name} ", "dim"), (value, style or "bold"))


def _times(window: Mapping[str, Any], of: str) -> str:
    return "  ".join(_ms(window[f"{of}_{each}_ms"]) for each in ("p50", "p90", "p99"))


def _problem(problem: Mapping[str, Any]) -> Text:
    style = "bold red" if problem["severity"] == "critical" else "yellow"
    return Text.assemble(
        (f"{problem['severity']}: ", style), problem["says"], no_wrap=True, overflow="ellipsis"
    )


def _instances(role: str, listed: Sequence[Row], room: int) -> Table:
    left = len(listed) - room
    table = Table(
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        caption=f"and {left} more" if left else None,
        caption_justify="left",
        pad_edge=False,
    )
    table.add_column(role, no_wrap=True, overflow="ellipsis", min_width=9)
    table.add_column("health", no_wrap=True)
    table.add_column("KV memory", no_wrap=True)
    table.add_column("queue", no_wrap=True)
    for heading in ("prefills", "decodes", "engine", "cached"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in listed[:room]:
        health = row["health"] if row["retry_in_s"] is None else f"{row['health']} {row['retry_in_s']:.0f} s"
        engine = (
            UNKNOWN if row["engine_running"] is None else f"{row['engine_running']}+{row['engine_waiting']}"
        )
        table.add_row(
            row["id"],
            Text(health, style=_HEALTH.get(row["health"], "yellow")),
            _bar(row["kv_usage"], _percent(row["kv_usage"])),
            _bar(row["queue_ms"] / _FULL_QUEUE_MS, _ms(row["queue_ms"])),
            str(row["pending_prefills"]),
            str(row["active_decodes"]),
            engine,
            _cached(row),
        )
    return table


def _bar(share: float | None, says: str, cells: int = 10) -> Text:
    filled = round(min(max(share or 0.0, 0.0), 1.0) * cells)
    colour = "red" if (share or 0.0) >= 0.95 else "yellow" if (share or 0.0) >= 0.8 else "blue"
    return Text.assemble(("█" * filled, colour), ("░" * (cells - filled), "dim"), f" {says:>7}")


def _cached(row: Row, cells: int = 8) -> Text:
    """How much, and its parts by tier, each in the tier's colour."""
    blocks = {tier: row[f"{tier}_blocks"] for tier in TIERS}
    total = sum(blocks.values())
    parts = Text()
    for tier, colour in TIERS.items():
        parts.append("█" * round(cells * blocks[tier] / max(total, 1)), colour)
    size = row["block_size"]
    says = _bytes(total * size * row["kv_bytes_per_token"]) if size else f"{total} blocks"
    return Text.assemble(parts, f" {says:>8}")


def _number(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _percent(share: float | None) -> str:
    return UNKNOWN if share is None else f"{share:.0%}" if share in (0, 1) else f"{share * 100:.1f}%"


def _ms(ms: float | None) -> str:
    if ms is None:
        return UNKNOWN
    return f"{ms / 1e3:.2f} s" if ms >= 1_000 else f"{ms:.0f} ms" if ms >= 10 or ms == 0 else f"{ms:.1f} ms"


def _bytes(value: float) -> str:
    step = 0
    while value >= 1024 and step < len(_UNITS) - 1:
        value, step = value / 1024, step + 1
    return f"{value:.0f} {_UNITS[step]}" if value >= 10 or value == 0 else f"{value:.1f} {_UNITS[step]}"
