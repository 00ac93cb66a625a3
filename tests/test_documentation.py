"""The pages under docs: links lead somewhere, and what is generated is current."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [
    *sorted((ROOT / "docs").glob("*.md")),
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")),
    ROOT / "helm" / "conductor" / "README.md",
    ROOT / "benchmarks" / "README.md",
]
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where its dataclasses look for their names
    spec.loader.exec_module(module)
    return module


def _text(page: Path) -> Iterator[str]:
    """Lines outside of code."""
    fenced = False
    for line in page.read_text().splitlines():
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif not fenced:
            yield line


@cache
def _anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    found: set[str] = set()
    for line in _text(page):
        if match := re.match(r"#+ (.*)", line):
            plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", match[1]).strip().lower()
            name = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
            number = 0
            while (anchor := name if number == 0 else f"{name}-{number}") in found:
                number += 1
            found.add(anchor)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_relative_link_leads_somewhere(page: Path) -> None:
    broken = []
    for line in _text(page):
        for target in LINK.findall(re.sub(r"`[^`]*`", "", line)):
            if re.match(r"[a-z]+:", target):
                continue
            path, _, anchor = target.partition("#")
            found = (page.parent / path).resolve() if path else page
            if not found.exists() or (anchor and found.suffix == ".md" and anchor not in _anchors(found)):
                broken.append(target)
    assert not broken


def test_every_page_is_in_the_table_of_contents() -> None:
    index = ROOT / "docs" / "README.md"
    listed = {target for line in _text(index) for target in LINK.findall(line)}
    missing = {page.name for page in (ROOT / "docs").glob("*.md")} - listed - {"README.md"}
    assert not missing


def test_every_page_is_in_the_site() -> None:
    nav = (ROOT / "mkdocs.yml").read_text().partition("nav:")[2]
    assert set(re.findall(r"[\w-]+\.md", nav)) == {page.name for page in (ROOT / "docs").glob("*.md")}


def test_the_configuration_reference_is_current_and_says_what_every_key_means() -> None:
    module = script("configuration_reference")
    assert module.REFERENCE.read_text() == module.reference(), (
        "run: python scripts/configuration_reference.py"
    )
    found = list(module.keys(module.meanings(module.GUIDE.read_text())))
    assert not [key.name for key in found if not key.meaning]
    assert len({key.name for key in found}) == len(found) > 150


def test_every_alert_is_in_the_runbook() -> None:
    rules = (ROOT / "helm" / "conductor" / "templates" / "prometheusrule.yaml").read_text()
    alerts = re.findall(r"alert: (\w+)", rules)
    runbook = ROOT / "docs" / "runbook.md"
    assert len(alerts) >= 10
    assert [alert for alert in alerts if alert.lower() not in _anchors(runbook)] == []


def test_metrics_that_are_named_exist_in_the_list_of_metrics() -> None:
    """Those of the runbook and of troubleshooting."""
    listed = (ROOT / "docs" / "api.md").read_text()
    known = set(re.findall(r"`(conductor_\w+)`", listed))
    last = ""
    for name in re.findall(r"`(conductor_\w+|_\w+)`", listed):  # short forms follow a whole name
        if name.startswith("conductor_"):
            last = name
        else:
            parts = last.split("_")
            known |= {"_".join(parts[:length]) + name for length in range(1, len(parts) + 1)}
    for page in ("runbook.md", "troubleshooting.md"):
        named = set(re.findall(r"\bconductor_[a-z_]+\b", (ROOT / "docs" / page).read_text()))
        assert not {each for each in named if each not in known and each.removesuffix("_bucket") not in known}
