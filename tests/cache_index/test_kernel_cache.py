"""Stale or wrong kernels are never used silently."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
from numba.core import config
from numba.core.types import int64

from cache_index import KernelError, kernels, self_check, warm, wire_kernels
from cache_index.kernel_cache import cache_directory
from cache_index.kernel_set import KernelSet, SourcesChangedError, on_first_compilation
from cache_index.kernels import compilation
from cache_index.wire_kernels import compilation as wire_compilation


def test_another_source_has_another_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "cache"))
    source = tmp_path / "source.py"
    source.write_text("a = 1\n")
    first = cache_directory(source)
    source.write_text("a = 2\n")
    assert cache_directory(source) != first
    source.write_text("a = 1\n")
    assert cache_directory(source) == first
    assert first.is_relative_to(tmp_path / "cache")


def test_kernels_are_kept_apart_by_all_their_source() -> None:
    """Also those of other files: Numba does not notice when they change."""
    of_index = set(Path(str(kernels.__file__)).parent.glob("*.py"))
    of_wire = set(Path(str(wire_kernels.__file__)).parent.glob("*.py"))
    assert len(of_index) > 1 and set(compilation.SOURCES) == of_index
    assert set(wire_compilation.SOURCES) == of_index | of_wire
    assert cache_directory(*compilation.SOURCES) == kernels.CACHE_DIRECTORY
    assert cache_directory(*wire_compilation.SOURCES) == wire_kernels.CACHE_DIRECTORY
    assert kernels.CACHE_DIRECTORY != wire_kernels.CACHE_DIRECTORY


def test_a_compilation_is_told_of_and_what_the_cache_has_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "doubling.py").write_text("def double(x):\n    return 2 * x\n")
    monkeypatch.syspath_prepend(tmp_path)
    told: list[str] = []
    for start in ("first", "second"):
        on_first_compilation(lambda start=start: told.append(start))  # type: ignore[misc]
        module = importlib.reload(importlib.import_module("doubling"))
        kernels_of_source = KernelSet(tmp_path / "doubling.py")
        double = kernels_of_source.kernel(int64)(module.double)
        kernels_of_source.compile_all()
        assert double(21) == 42
    assert told == ["first"]


def test_sources_replaced_while_they_are_loaded_are_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else kernels of a mixture would be compiled, and kept as those of the old files."""
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "cache"))
    source = tmp_path / "source.py"
    source.write_text("a = 1\n")
    kernels_of_source = KernelSet(source)
    kernels_of_source.compile_all()
    source.write_text("a = 2\n")
    with pytest.raises(SourcesChangedError, match="start again"):
        kernels_of_source.compile_all()


def test_an_unusable_cache_is_replaced_by_a_temporary_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "file"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    source = tmp_path / "source.py"
    source.write_text("")
    assert cache_directory(source).is_dir()


def test_the_setting_of_others_is_untouched() -> None:
    warm()
    assert str(kernels.CACHE_DIRECTORY) != config.CACHE_DIR


def test_a_wrong_result_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(self_check.KNOWN_HASHES, 16, 1)
    monkeypatch.setattr(self_check, "_ready", False)
    with pytest.raises(KernelError, match="hash_words") as caught:
        warm()
    assert str(kernels.CACHE_DIRECTORY) in str(caught.value)


def test_kernels_accept_no_other_types() -> None:
    """A call that would have to be compiled first must fail instead of stalling."""
    warm()
    with pytest.raises(TypeError):
        kernels.hash_words([1.5], 1, 2)
