"""Debian's Chromium, driven by playwright; a page that tells of everything that went wrong in it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from playwright.sync_api import Browser, Page, expect, sync_playwright

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
_FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
)

expect.set_options(timeout=20_000)  # pages are slow to come where all cores are busy


@contextmanager
def browser() -> Iterator[Browser]:
    """A headless one."""
    with sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=CHROMIUM, headless=True, args=list(_FLAGS))
        try:
            yield opened
        finally:
            opened.close()


@dataclass
class Watched:
    """A page in a session of its own. ``told`` are errors of console and scripts, ``urls`` all that were asked."""

    page: Page
    told: list[str] = field(default_factory=list)
    urls: list[str] = field(default_factory=list)

    def origins(self) -> set[str]:
        return {f"{urlsplit(url).scheme}://{urlsplit(url).netloc}" for url in self.urls}


@contextmanager
def watched_page(opened: Browser, **options: Any) -> Iterator[Watched]:
    """``options`` are those of playwright's `new_context`."""
    context = opened.new_context(**options)
    context.set_default_timeout(20_000)
    page = context.new_page()
    watched = Watched(page)
    page.on("console", lambda m: watched.told.append(m.text) if m.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: watched.told.append(str(error)))
    page.on("request", lambda request: watched.urls.append(request.url))
    try:
        yield watched
    finally:
        context.close()
