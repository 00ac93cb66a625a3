"""`conductor config`: show what is in effect."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
import yaml

from conductor.config import load_config


def config(
    file: Annotated[
        Path | None, typer.Option("--config", "-c", help="YAML file, as for `conductor serve`.")
    ] = None,
) -> None:
    """Print the effective configuration (file, CONDUCTOR_* environment and defaults) as YAML."""
    effective = load_config(file).model_dump(mode="json")
    yaml.safe_dump(effective, sys.stdout, sort_keys=False)
