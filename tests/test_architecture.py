"""Imports point one way: cache_index <- conductor <- router; simulator uses conductor and cache_index."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAY_IMPORT = {
    "cache_index": set(),
    "conductor": {"cache_index"},
    "router": {"conductor", "cache_index"},  # of the index it uses how kernels are compiled
    "simulator": {"conductor", "cache_index"},
}
PACKAGES = set(MAY_IMPORT)


def _modules(package: str) -> list[Path]:
    return [p for p in sorted((ROOT / package).rglob("*.py")) if "cli" not in p.relative_to(ROOT).parts]


def _imported_packages(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names.add(node.module.split(".")[0])
    return names


@pytest.mark.parametrize("package", sorted(PACKAGES))
def test_imports_point_one_way(package: str) -> None:
    allowed = MAY_IMPORT[package] | {package}
    for path in _modules(package):
        upwards = (_imported_packages(path) & PACKAGES) - allowed
        assert not upwards, f"{path.relative_to(ROOT)} imports {', '.join(sorted(upwards))}"


def test_nothing_imports_the_command_line() -> None:
    for package in PACKAGES:
        for path in _modules(package):
            assert "conductor.cli" not in path.read_text(), f"{path.relative_to(ROOT)} uses the command line"


def test_no_module_is_a_drawer() -> None:
    drawers = {"utils", "helpers", "common", "manager", "base", "misc"}
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            assert path.stem.lstrip("_") not in drawers, path.relative_to(ROOT)


@pytest.mark.parametrize(
    "module",
    [
        "simulator.emulator.nursery",
        *(f"conductor.cli.{name}" for name in ("cache", "plan", "register", "top")),
    ],
)
def test_what_needs_no_compiler_starts_without_one(module: str) -> None:
    asked = f"import sys, {module}; print(*sys.modules)"
    loaded = subprocess.run(
        (sys.executable, "-c", asked), cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    assert module in loaded
    assert not {"numba", "llvmlite", "ortools"} & set(loaded)
