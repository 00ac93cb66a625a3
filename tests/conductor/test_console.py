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
