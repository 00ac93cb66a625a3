"""A file of instances: followed through every way of changing it, and its faults told with line and field."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster_factory import make_scheduler

from conductor.discovery.instance_file import InstanceFileError, WatchedInstanceFile, read_instances
from conductor.discovery.roll import Roll
from conductor.membership import Membership
from conductor.scheduler import Scheduler

ONE = "instances:\n  - {id: a, url: 'http://10.0.0.1:8000'}\n"
TWO = ONE + "  - id: b\n    url: http://10.0.0.2:8000\n    role: decode\n"


class Followed:
    """A watched file over an empty cluster."""

    def __init__(self, path: Path) -> None:
        self.scheduler: Scheduler = make_scheduler("")
        self.membership = Membership(self.scheduler, lambda: 1.0)
        self.roll = Roll(self.membership, lambda: 5.0, drain_s=10.0)
        self.file = WatchedInstanceFile(path, self.roll, check_s=0.01)

    def ids(self) -> set[str]:
        """After a look at the file."""
        self.file.check()
        self.membership.check_drained()
        return {instance.instance_id for instance in self.scheduler.cluster}

    @property
    def error(self) -> str | None:
        return self.roll.sources["file"].error


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "instances.yaml"


@pytest.fixture
def followed(path: Path) -> Iterator[Followed]:
    yield Followed(path)


def test_a_file_changes_in_place_and_by_renaming(followed: Followed, path: Path) -> None:
    path.write_text(ONE)
    assert followed.ids() == {"a"}
    path.write_text(TWO)
    assert followed.ids() == {"a", "b"}
    new = path.with_suffix(".new")
    new.write_text(ONE)
    new.rename(path)
    assert followed.ids() == {"a"}
    path.write_text("instances: []\n")
    assert followed.ids() == set()


@pytest.mark.parametrize(
    "broken",
    [
        "instances: [{id: 2026-13-01}]\n",
        "instances: [{id: a, ranks: !!bool x}]\n",
        "instances: " + "[" * 5_000,
    ],
)
async def test_a_file_is_followed_after_values_that_yaml_cannot_read(
    followed: Followed, path: Path, broken: str
) -> None:
    path.write_text(ONE)
    assert followed.ids() == {"a"}
    following = asyncio.create_task(followed.file.check_forever())
    path.write_text(broken)
    async with asyncio.timeout(10):
        while followed.error is None and not following.done():
            await asyncio.sleep(0.01)
        assert "YAML" in (followed.error or "") and followed.ids() == {"a"}
        path.write_text(TWO)
        while len(followed.scheduler.cluster) < 2 and not following.done():
            await asyncio.sleep(0.01)
    assert followed.ids() == {"a", "b"}
    following.cancel()


def test_a_config_map_changes_by_a_symbolic_link(tmp_path: Path) -> None:
    """As the kubelet does it: the file is a link through `..data`, which is exchanged."""
    for name, text in (("..2026_11_01", ONE), ("..2026_11_02", TWO)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "instances.yaml").write_text(text)
    data = tmp_path / "..data"
    data.symlink_to("..2026_11_01")
    path = tmp_path / "instances.yaml"
    path.symlink_to("..data/instances.yaml")
    followed = Followed(path)
    assert followed.ids() == {"a"}
    new = tmp_path / "..data_tmp"
    new.symlink_to("..2026_11_02")
    new.rename(data)
    assert followed.ids() == {"a", "b"}


def test_a_broken_file_changes_nothing_and_is_told_once_mended(followed: Followed, path: Path) -> None:
    path.write_text(TWO)
    assert followed.ids() == {"a", "b"}
    path.write_text(TWO.replace("decode", "decoder"))
    assert followed.ids() == {"a", "b"}
    assert followed.error is not None
    assert f"{path}: line 5: 'instances.1.role'" in followed.error
    assert followed.ids() == {"a", "b"}
    assert followed.roll.sources["file"].failures == 1, "it is read again only when it changes"
    path.unlink()
    assert followed.ids() == {"a", "b"}
    assert "No such file" in (followed.error or "")
    path.write_text(ONE)
    assert followed.ids() == {"a"}
    assert followed.error is None


async def test_changes_are_found_without_being_asked(followed: Followed, path: Path) -> None:
    task = asyncio.create_task(followed.file.check_forever())
    try:
        path.write_text(TWO)
        async with asyncio.timeout(20):
            while len(followed.scheduler.cluster) < 2:
                await asyncio.sleep(0.01)
    finally:
        task.cancel()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "line 1: must hold a mapping with 'instances: [...]', not nothing"),
        ("- id: a\n", "line 1: must hold a mapping with 'instances: [...]', not a list"),
        ("instances:\n  - {id: a, url: [}\n", "line 2: is not valid YAML"),
        ("instances:\n  - {id: a}\n", "line 2: 'instances.0.url' is required"),
        ("models: []\ninstances: []\n", "line 1: unknown key 'models'; known keys here: instances"),
        (
            "instances:\n\n  - id: a\n    url: http://x:1\n    rol: mixed\n",
            "line 5: unknown key 'instances.0.rol'; did you mean 'role'?",
        ),
        (
            "instances:\n  - id: a\n    url: http://x:1\n    kv_events:\n      - {topic: kv}\n",
            "line 5: 'instances.0.kv_events.0.endpoint' is required",
        ),
        (
            "instances:\n- {id: a, url: 'http://x:1'}\n- {id: a, url: 'http://y:1'}\n",
            "line 3: 'instances.1.id': the id 'a' is used more than once",
        ),
        ("instances: 3\n", "line 1: 'instances'"),
    ],
)
def test_faults_are_told_with_line_and_field(path: Path, text: str, said: str) -> None:
    path.write_text(text)
    with pytest.raises(InstanceFileError) as error:
        read_instances(path)
    assert said in str(error.value)


def test_every_fault_is_told(path: Path) -> None:
    path.write_text("instances:\n  - {id: a, url: 'ftp://x'}\n  - {id: b, url: 'http://x:1', ranks: 0}\n")
    with pytest.raises(
        InstanceFileError, match=r"line 2: 'instances\.0\.url': .*; line 3: 'instances\.1\.ranks'"
    ):
        read_instances(path)


@pytest.mark.parametrize("indent", [None, 2, "\t"])
def test_json_is_read_too(tmp_path: Path, indent: int | str | None) -> None:
    path = tmp_path / "instances.json"
    entry = {"id": "a", "url": "http://10.0.0.1:8000", "role": "prefill", "block_size": 32}
    path.write_text(json.dumps({"instances": [entry]}, indent=indent))
    (instance,) = read_instances(path)
    assert instance.model_dump(mode="json", include=set(entry)) == entry
    path.write_text(json.dumps({"instances": [entry | {"role": "x"}]}, indent=2))
    with pytest.raises(InstanceFileError, match=r"line 6: 'instances\.0\.role'"):
        read_instances(path)


FOLLOWS = """
import asyncio, os, sys
from pathlib import Path
sys.path.insert(0, "tests/support")
from cluster_factory import make_scheduler
from conductor.discovery.instance_file import WatchedInstanceFile
from conductor.discovery.roll import Roll
from conductor.membership import Membership

async def main(path):
    roll = Roll(Membership(make_scheduler(""), lambda: 1.0), lambda: 5.0, drain_s=10.0)
    following = asyncio.create_task(WatchedInstanceFile(path, roll, check_s=0.01).check_forever())
    await asyncio.sleep(0.5)
    following.cancel()

asyncio.run(main(Path(sys.argv[1])))
print("ended")
"""


def test_a_file_system_that_hangs_does_not_keep_the_process_from_ending(path: Path) -> None:
    os.mkfifo(path)  # reading it waits for somebody who writes
    done = subprocess.run(
        (sys.executable, "-c", FOLLOWS, str(path)),
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout == "ended\n", done.stderr
