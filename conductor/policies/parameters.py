"""Checks of policy parameters, which come from configuration files: errors name the parameter and its range."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf


def number(name: str, value: float, *, least: float = -inf, most: float = inf) -> float:
    """``value`` as a float. Raises ValueError when it is no number from ``least`` to ``most``."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise ValueError(f"{name} must be a number{_range(least, most)}, not {value!r}")
    return float(value)


def whole_number(name: str, value: int, *, least: int = 0) -> int:
    """``value`` itself. Raises ValueError when it is no whole number, or below ``least``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, not {value!r}")
    return value


def flag(name: str, value: bool) -> bool:
    """``value`` itself. Raises ValueError when it is neither true nor false."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false, not {value!r}")
    return value


def one_of(name: str, value: str, known: Sequence[str]) -> str:
    """``value`` itself. Raises ValueError when it is not among ``known``."""
    if value not in known:
        raise ValueError(f"{name} must be one of {', '.join(known)}, not {value!r}")
    return value


def _range(least: float, most: float) -> str:
    if least == -inf and most == inf:
        return ""
    if most == inf:
        return f" of at least {least:g}"
    return f" from {least:g} to {most:g}"
