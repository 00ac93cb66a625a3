"""The script that anyone can run, on a table made up for it."""

import json
import subprocess
import sys
from pathlib import Path

from silicon_table import row, synthetic_runs, write_table

from simulator.accuracy import FRAMEWORKS

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "accuracy.py"


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=SCRIPT.parents[1],
        env={"PYTHONPATH": str(SCRIPT.parents[1]), "PATH": ""},
    )


def test_errors_as_one_json_object(tmp_path: Path) -> None:
    runs = [run for framework in FRAMEWORKS for run in synthetic_runs(framework)[::3]]
    table = write_table(tmp_path / "silicon.csv", map(row, runs))
    done = _run("--json", "--quick", "--silicon", str(table))
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["silicon"]["dense_runs"] == len(runs)
    assert result["silicon"]["fitted_to_all"]["tpot_median"] < 0.02
    assert set(result["silicon"]["coefficients"]) == set(FRAMEWORKS)
    assert set(result["silicon"]["held_out"]) == {"random", "model"}
    assert len(result["composites"]) == 50


def test_a_missing_table_is_said_in_a_line(tmp_path: Path) -> None:
    done = _run("--silicon", str(tmp_path / "absent.csv"))
    assert done.returncode == 1
    assert "cannot read" in done.stderr
    assert "Traceback" not in done.stderr
