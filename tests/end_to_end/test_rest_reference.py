"""The REST reference says what the process that is served documents."""

import importlib.util
from pathlib import Path

from front_door_process import FrontDoor

SCRIPT = Path(__file__).parents[2] / "scripts" / "rest_reference.py"


def test_the_rest_reference_is_current(cluster: FrontDoor) -> None:
    spec = importlib.util.spec_from_file_location("rest_reference", SCRIPT)
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    present = script.reference(cluster.get("/openapi.json"))
    assert script.REFERENCE.read_text() == present, "run: python scripts/rest_reference.py"
