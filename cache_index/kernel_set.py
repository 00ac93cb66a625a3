"""Kernels: functions that are compiled ahead of their first use, each for one signature."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from numba import njit
from numba.core import event
from numba.core.types import unliteral

from cache_index.kernel_cache import cache_directory, cached_njit, digest_of


class SourcesChangedError(RuntimeError):
    """Files of this package were replaced while it was being loaded; a new start uses the new ones."""


class KernelSet:
    """The kernels whose code stands in ``sources``, and where they are kept between runs.

    ``sources`` must be all files that the kernels' code comes from: see ``kernel_cache``.
    """

    def __init__(self, *sources: Path) -> None:
        self._sources = sources
        self._digest = digest_of(*sources)
        self.directory = cache_directory(*sources)
        self._kernels: list[tuple[Any, tuple[Any, ...]]] = []

    def kernel(self, *signature: Any, nogil: bool = True) -> Callable[[Callable[..., Any]], Any]:
        """A function that Python calls. It has one signature, so that no argument can cause a compilation."""

        def register(function: Callable[..., Any]) -> Any:
            dispatcher = cached_njit(function, self.directory, nogil=nogil)
            self._kernels.append((dispatcher, signature))
            return dispatcher

        return register

    def compile_all(self) -> None:
        """Compile every kernel, or load it from the cache, and close the set of signatures.

        Raises SourcesChangedError when what was imported may be a mixture of old and new files: its kernels would
        be wrong, and kept.
        """
        if digest_of(*self._sources) != self._digest:
            raise SourcesChangedError(
                f"files in {self._sources[0].parent} changed while starting; start again"
            )
        for dispatcher, signature in self._kernels:
            if not dispatcher.signatures:
                dispatcher.compile(signature)
                dispatcher.disable_compile()


class _FirstCompilation(event.Listener):
    def __init__(self, tell: Callable[[], object]) -> None:
        self._tell: Callable[[], object] | None = tell

    def on_start(self, started: object) -> None:
        tell, self._tell = self._tell, None
        if tell is not None:
            tell()

    def on_end(self, ended: object) -> None:
        pass


def on_first_compilation(tell: Callable[[], object]) -> None:
    """Call ``tell``, once, before a kernel is compiled in this process because it is in no cache."""
    event.register("numba:compile", _FirstCompilation(tell))  # type: ignore[no-untyped-call]


def entry_point(kernel: Any) -> Callable[..., Any]:
    """A compiled kernel's machine code, called without a look at the arguments, which halves a call's cost.

    Numbers are converted; arrays must have the signature's type and layout, which nobody checks.
    """
    (compiled,) = kernel.overloads.values()
    entry: Callable[..., Any] = compiled.entry_point
    return entry


def compiled(kernel: Any, *signature: Any) -> Callable[..., Any]:
    """The entry point of one signature of a kernel that others may be compiled for; see `entry_point`."""
    if signature not in kernel.overloads:
        kernel.compile(signature)
    entry: Callable[..., Any] = kernel.overloads[signature].entry_point
    return entry


def inlined(function: Callable[..., Any]) -> Any:
    """A function that only kernels call, never Python; it is compiled into them."""
    return _part(function, forceinline=True)


def outlined(function: Callable[..., Any]) -> Any:
    """Like inlined, for what is long or rare: compiled once per kernel, however often it is called."""
    return _part(function)


def _part(function: Callable[..., Any], **options: bool) -> Any:
    compiler: Any = njit  # whose stubs lack the two options that save compile time
    return compiler(error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True, **options)(function)


def subroutine(function: Callable[..., Any]) -> Any:
    """Like outlined, and compiled once whatever constants it is called with: Numba makes a variant for each."""
    dispatcher = _part(function)
    template = dispatcher.get_call_template

    def without_constants(arguments: Any, keywords: Any) -> Any:
        return template(tuple(unliteral(each) for each in arguments), keywords)  # type: ignore[no-untyped-call]

    dispatcher.get_call_template = without_constants
    return dispatcher
