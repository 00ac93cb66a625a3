"""Orders for a running cluster's caches, by REST and by `conductor cache`: the engines carry them out, the index
learns of it from their events, and requests profit."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from front_door_process import FrontDoor, conductor_command, front_door

PROMPT = " ".join(f"Section {i}: what the store holds, and for whom." for i in range(60))
TOKEN = "an-administrators-key"


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontDoor]:
    """Two mixed engines with host tiers, whose REST API takes a key."""
    config = tmp_path_factory.mktemp("config") / "cluster.yaml"
    config.write_text(
        f"emulation: {{cluster: '2', speed: 10, host_blocks: 5000}}\nserver: {{admin_token: {TOKEN}}}\n"
    )
    arguments = ("--config", str(config))
    headers = {"authorization": f"Bearer {TOKEN}"}
    with front_door(tmp_path_factory.mktemp("tiers"), *arguments, headers=headers) as started:
        yield started


def cache(door: FrontDoor, *arguments: str, code: int = 0, token: str = TOKEN) -> Any:
    """What `conductor cache ... --json` prints, or its error."""
    command = conductor_command("cache", *arguments, "--url", door.url, "--token", token, "--json")
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ran.returncode == code, ran.stdout + ran.stderr
    return json.loads(ran.stdout) if ran.stdout else ran.stderr


def prefilled(door: FrontDoor, prompt: str) -> str:
    """Have a prompt computed; the instance that has it."""
    body = {"model": "emulated-8b", "prompt": prompt, "max_tokens": 1}
    answer = door.http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return str(answer.headers["x-conductor-prefill-instance"])


def held(door: FrontDoor, file: Path) -> dict[str, dict[str, int]]:
    """Tokens of the prompt by instance and tier, cumulative."""
    return cache(door, "lookup", "--file", str(file))["default"]


def test_a_prompt_is_replicated_promoted_and_dropped(door: FrontDoor, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text(PROMPT)
    first = prefilled(door, PROMPT)
    second = {"mixed-0": "mixed-1", "mixed-1": "mixed-0"}[first]
    door.wait_until(lambda: held(door, file)[first]["GPU"] > 0, "the index knows")
    tokens = held(door, file)[first]["GPU"]
    assert held(door, file)[second]["CPU"] == 0

    [copied] = cache(door, "prefetch", f"{second}/host", "--file", str(file), "--wait")["actions"]
    assert (copied["kind"], copied["state"], copied["executor"]) == ("replicate", "done", "emulated")
    assert copied["blocks_done"] * 16 == tokens
    assert copied["source"]["instance"] == first
    door.wait_until(lambda: held(door, file)[second]["CPU"] == tokens, "the copy is known")
    assert held(door, file)[second]["GPU"] == 0

    [promoted] = cache(door, "prefetch", f"{second}/device", "--file", str(file), "--wait")["actions"]
    assert (promoted["kind"], promoted["source"]["tier"]) == ("prefetch", "host")
    door.wait_until(lambda: held(door, file)[second]["GPU"] == tokens, "the promotion is known")

    cache(door, "pin", f"{second}/device", "--file", str(file), "--wait")
    [kept] = cache(door, "clear", f"{second}/device", "--file", str(file), "--wait", code=1)["actions"]
    assert (kept["state"], kept["blocks_done"]) == ("failed", 0)  # what is pinned stays
    cache(door, "unpin", f"{second}/device", "--file", str(file), "--wait")
    cache(door, "clear", f"{second}/device", "--file", str(file), "--wait")
    cache(door, "clear", f"{second}/host", "--wait")
    door.wait_until(lambda: held(door, file)[second]["DISK"] == 0, "the second forgot it")
    assert held(door, file)[first]["GPU"] == tokens


def test_moving_leaves_nothing_behind(door: FrontDoor) -> None:
    prompt = "Another one. " + PROMPT
    first = prefilled(door, prompt)
    second = {"mixed-0": "mixed-1", "mixed-1": "mixed-0"}[first]
    door.wait_until(
        lambda: cache(door, "lookup", "--text", prompt)["default"][first]["GPU"] > 0, "the index knows"
    )
    places = (f"{first}/device", f"{second}/host")
    [moved] = cache(door, "move", *places, "--text", prompt, "--wait")["actions"]
    assert (moved["kind"], moved["state"], moved["partial"]) == ("move", "done", False)
    door.wait_until(
        lambda: cache(door, "lookup", "--text", prompt)["default"][first]["GPU"] == 0, "the source dropped it"
    )


def test_actions_are_listed_and_counted(door: FrontDoor) -> None:
    tokens = "[" + ",".join(str(token) for token in range(64)) + "]"
    [lost] = cache(
        door, "prefetch", "mixed-0/device", "--source", "mixed-1/host", "--tokens", tokens, "--wait", code=1
    )["actions"]
    assert (lost["state"], lost["detail"]) == ("failed", "the source had lost them")
    listed = cache(door, "actions", "--state", "failed")["actions"]
    assert lost["id"] in [action["id"] for action in listed]
    name = 'conductor_actions_ended_total{executor="emulated",kind="replicate",outcome="failed"}'
    assert door.samples()[name] >= 1
    command = conductor_command("cache", "actions", "--state", "failed", "--url", door.url, "--token", TOKEN)
    shown = subprocess.run(
        command, capture_output=True, text=True, timeout=60, env=os.environ | {"COLUMNS": "80"}
    ).stdout.splitlines()
    row = next(line.split() for line in shown if line.startswith(lost["id"]))
    assert row[1:5] == ["replicate", "mixed-1/host", "mixed-0/device", "failed"]
    assert any(line.startswith(f"{lost['id']}: the source had lost them (after ") for line in shown)
    assert "has ended already" in cache(door, "cancel", lost["id"], code=2)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("pin", "mixed-0", "--text", "x"), "write INSTANCE/TIER"),
        (("pin", "mixed-0/device"), "give a prompt"),
        (("pin", "mixed-0/device", "--text", "x", "--tokens", "1"), "give the prompt once"),
        (("pin", "mixed-0/device", "--tokens", "1,x"), "write token ids"),
        (("pin", "mixed-0/device", "--text", "too short"), "less than one block of 16"),
        (("compress", "mixed-0/device", "--text", PROMPT), "they can only do emulated: evict, pin, unpin"),
        (("cancel", "nobody"), "is not known"),
        (("actions", "--state", "lost"), "state"),
    ],
)
def test_mistakes_are_explained(door: FrontDoor, arguments: tuple[str, ...], says: str) -> None:
    assert says in " ".join(cache(door, *arguments, code=2).split())


def test_orders_take_an_administrators_key(door: FrontDoor) -> None:
    assert "takes an administrator's key" in cache(door, "actions", code=2, token="wrong")
