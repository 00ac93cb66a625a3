"""The examples of docs/plan.md and docs/traces.md print what is printed there."""

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from conductor.cli import app

ROOT = Path(__file__).parents[3]
REAL_TRACES = ROOT.parent / "shared" / "traces"
EXAMPLES = [
    pytest.param(block, id=f"{name}-{number}")
    for name in ("plan", "traces")
    for number, block in enumerate(
        re.findall(r"```console\n(.*?)```", (ROOT / "docs" / f"{name}.md").read_text(), re.DOTALL)
    )
]


def commands_of(block: str) -> list[tuple[str, list[str]]]:
    """Each command, lines joined, with the lines it prints."""
    found: list[tuple[str, list[str]]] = []
    for line in block.replace("\\\n", "").splitlines():
        if line.startswith("$ "):
            found.append((line[2:], []))
        else:
            found[-1][1].append(line)
    return found


@pytest.mark.parametrize("block", EXAMPLES)
def test_examples(block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    for command, printed in commands_of(block):
        line, _, target = command.partition(" > ")
        program, *arguments = shlex.split(line)
        assert program == "conductor"
        for argument in arguments:
            if argument == "conversation_trace.jsonl":
                if not (REAL_TRACES / argument).exists():
                    pytest.skip("the traces are not here")
                Path(argument).symlink_to(REAL_TRACES / argument)
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0, result.output
        if target:
            Path(target).write_bytes(result.stdout_bytes)
        else:
            assert [each.rstrip() for each in result.stdout.splitlines()] == printed


def test_there_are_examples() -> None:
    assert len(EXAMPLES) == 5
