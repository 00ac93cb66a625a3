"""Writes what `conductor serve --config` takes into the schema of the Helm chart's values.

    python scripts/chart_schema.py

Everything else in `helm/conductor/values.schema.json` is kept as it stands there.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from conductor.config import Config

SCHEMA = Path(__file__).parents[1] / "helm" / "conductor" / "values.schema.json"


def with_configuration(schema: dict[str, Any]) -> dict[str, Any]:
    """``schema`` with the present model of the configuration as its `config`."""
    model = Config.model_json_schema()
    definitions = model.pop("$defs")
    return schema | {
        "properties": schema["properties"] | {"config": model},
        "$defs": dict(sorted(definitions.items())),
    }


if __name__ == "__main__":
    SCHEMA.write_text(json.dumps(with_configuration(json.loads(SCHEMA.read_text())), indent=1) + "\n")
