"""The console's files: what is sent with them, and that they need nothing from anywhere else."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from conductor.console import make_console_routes

STATIC = Path(__file__).parents[2] / "conductor" / "console" / "static"
FILES = sorted(STATIC.iterdir())


PAIRS = [
    *(("ink", on) for on in ("page", "card", "sunk", "accent-soft")),
    *(("soft", on) for on in ("page", "card", "sunk")),
    *(("accent", on) for on in ("card", "accent-soft")),
    *((kind, f"{kind}-soft") for kind in ("good", "warn", "bad")),
    *(("bad", "card"), ("on-accent", "accent")),
]


@pytest.fixture
def web() -> Iterator[TestClient]:
    app = FastAPI()
    app.include_router(make_console_routes())
    with TestClient(app) as client:
        yield client


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_file_is_served_with_its_type_and_policy(web: TestClient, path: Path) -> None:
    answer = web.get(f"/ui/{path.name}")
    assert answer.content == path.read_bytes()
    kinds = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
    assert answer.headers["content-type"].startswith(kinds[path.suffix])
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'") and "unsafe" not in policy and "http" not in policy
    assert answer.headers["x-content-type-options"] == "nosniff"
    again = web.get(f"/ui/{path.name}", headers={"if-none-match": answer.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


def test_where_it_begins(web: TestClient) -> None:
    moved = web.get("/ui", follow_redirects=False)
    assert (moved.status_code, moved.headers["location"]) == (307, "ui/")
    assert web.get("/ui").content == (STATIC / "index.html").read_bytes()
    assert "/ui" not in str(web.get("/openapi.json").json()["paths"])


@pytest.mark.parametrize("name", ["nothing.js", "..%2Fpages.py", "__init__.py", "%2e%2e/pages.py"])
def test_nothing_else_is_served(web: TestClient, name: str) -> None:
    assert web.get(f"/ui/{name}").status_code == 404


def test_every_file_that_is_asked_for_is_there() -> None:
    names = {path.name for path in FILES}
    asked = {"index.html"}
    for path in FILES:
        text = path.read_text()
        asked |= set(re.findall(r"""(?:from|import) "\./([^"]+)\"""", text))
        if path.suffix == ".html":
            asked |= {
                name for name in re.findall(r'(?:src|href)="([^"#]+)"', text) if not name.startswith("..")
            }
    assert asked == names


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_nothing_comes_from_elsewhere_and_nothing_becomes_markup(path: Path) -> None:
    text = path.read_text().replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"https?://|//[a-z0-9.-]+\.[a-z]{2,}/", text)
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text
    )
    if path.suffix == ".html":
        assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*src=)", text)


def themes() -> dict[str, dict[str, str]]:
    """The colours of each theme by their names."""
    text = (STATIC / "console.css").read_text()
    blocks = re.findall(r"\n?\s*(:root[^{]*)\{([^}]*--page[^}]*)\}", text)
    return {
        selector.strip(): dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", body)) for selector, body in blocks
    }


def contrast(one: str, other: str) -> float:
    """Of two colours, as WCAG 2 defines it."""

    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_dark_is_the_same_whoever_chose_it() -> None:
    light, by_system, by_hand = themes().values()
    assert by_system == by_hand and light.keys() == by_hand.keys() and light != by_hand


@pytest.mark.parametrize(("text", "ground"), PAIRS)
def test_text_can_be_read_in_every_theme(text: str, ground: str) -> None:
    for selector, colours in themes().items():
        assert contrast(colours[text], colours[ground]) >= 4.5, selector
