"""Kernels are compiled in several processes, some behind others."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import typer

from conductor.cli import warm


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Each leaves a file; those behind the index see the index's."""

    def index() -> None:
        time.sleep(0.2)
        (tmp_path / "index").touch()

    def behind(name: str) -> None:
        assert (tmp_path / "index").exists()
        (tmp_path / name).touch()

    monkeypatch.setattr(warm, "_AT_ONCE", {"index": index, "router": (tmp_path / "router").touch})
    monkeypatch.setattr(
        warm, "_BEHIND_INDEX", {name: lambda name=name: behind(name) for name in ("decisions", "reuse")}
    )
    return tmp_path


@pytest.mark.parametrize("cores", [1, 4])
def test_all_are_compiled_and_some_behind_the_index(
    groups: Path, cores: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(warm.os, "sched_getaffinity", lambda pid: range(cores))
    warm.warm()
    assert {path.name for path in groups.iterdir()} == {"index", "router", "decisions", "reuse"}
    assert "kernels ready after" in capsys.readouterr().err


def test_what_cannot_be_compiled_ends_the_rest(
    groups: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def broken() -> None:
        raise OSError("no space left on device")

    def endless() -> None:
        time.sleep(600)

    monkeypatch.setattr(warm, "_AT_ONCE", {"index": endless, "router": broken})
    monkeypatch.setattr(warm.os, "sched_getaffinity", lambda pid: range(2))
    began_s = time.monotonic()
    with pytest.raises(typer.Exit) as ended:
        warm.warm()
    assert ended.value.exit_code == 1 and time.monotonic() - began_s < 60
    said = capfd.readouterr().err
    assert "no space left on device" in said and "the kernels of router could not be compiled" in said


def test_every_kernel_is_there_already(capsys: pytest.CaptureFixture[str]) -> None:
    warm.warm()
    assert "kernels ready after" in capsys.readouterr().err
