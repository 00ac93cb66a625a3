"""Frames recorded from real engines and stores, which lie beside the checkout; tests skip where they are absent."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2].parent / "shared" / "fixtures"


def recorded_lines(name: str) -> list[dict[str, Any]]:
    """The records of one file, one JSON object a line."""
    path = FOLDER / name
    if not path.exists():
        pytest.skip(f"no recording {name}")
    return [json.loads(line) for line in path.read_text().splitlines()]


def frames_of(record: dict[str, Any]) -> list[bytes]:
    return [bytes.fromhex(frame) for frame in record["frames_hex"]]
