"""`conductor index` is stopped or killed, engines go on meanwhile, and the next process tells the truth."""

from __future__ import annotations

import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from front_door_process import conductor_command, free_port
from kv_publisher import KvPublisher
from waiting import wait_for

BLOCK = 16
TOKENS = list(range(1000, 1000 + 8 * BLOCK))


class IndexProcess:
    """Starts `conductor index` over one folder, again and again, on one port."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder / "log"
        self._port = free_port()
        self._url = f"http://127.0.0.1:{self._port}"
        self._process: subprocess.Popen[bytes] | None = None
        folder.mkdir(exist_ok=True)

    def start(self, interval_s: float = 0.1) -> None:
        config = self.folder / "index.yaml"
        config.write_text(f"index: {{snapshot_interval_s: {interval_s}}}\nlog: {{format: json}}\n")
        arguments = ("--config", str(config), "--state-dir", str(self.folder), "--port", str(self._port))
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(conductor_command("index", *arguments), stderr=log)
        wait_for(self._answers)

    def stop(self, signum: int = signal.SIGTERM) -> None:
        assert self._process is not None
        self._process.send_signal(signum)
        code = self._process.wait(timeout=30)
        assert code == (-signal.SIGKILL if signum == signal.SIGKILL else 0), self.log.read_text()
        self._process = None

    def close(self) -> None:
        if self._process is not None:
            self.stop(signal.SIGKILL)

    def _answers(self) -> bool:
        assert self._process is not None and self._process.poll() is None, self.log.read_text()
        try:
            return httpx.get(f"{self._url}/health", trust_env=False).status_code == 200
        except httpx.TransportError:
            return False

    def post(self, path: str, body: Any) -> Any:
        answer = httpx.post(f"{self._url}{path}", json=body, trust_env=False)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def get(self, path: str) -> httpx.Response:
        return httpx.get(f"{self._url}{path}", trust_env=False)

    def register(self, engine: KvPublisher, instance: str) -> None:
        body = {
            "endpoint": engine.endpoint,
            "replay_endpoint": engine.replay_endpoint,
            "modelname": "llama",
            "instance_id": instance,
            "block_size": BLOCK,
        }
        self.post("/register", body)

    def matched(self) -> dict[str, int]:
        """Blocks of TOKENS by instance."""
        answer = self.post("/query", {"model": "llama", "token_ids": TOKENS})["default"]
        return {name: entry["longest_matched"] // BLOCK for name, entry in answer.items()}

    def metric(self, name: str) -> float:
        found = re.search(rf"^{name} (\S+)$", self.get("/metrics").text, re.MULTILINE)
        assert found is not None, name
        return float(found[1])

    def streams(self) -> dict[str, dict[str, Any]]:
        return {each["instance"]: each for each in self.get("/v1/cache/streams").json()["streams"]}

    def wait_until_saved(self) -> None:
        """All that is applied by now is in the file, and no save is needed any more."""
        sequences = [each["last_seq"] for each in self.streams().values()]
        saves = self.metric("conductor_index_snapshots_total")
        deadline_s = time.monotonic() + 20
        while time.monotonic() < deadline_s:
            time.sleep(0.5)
            before, saves = saves, self.metric("conductor_index_snapshots_total")
            if saves == before > 0:
                assert sequences == [each["last_seq"] for each in self.streams().values()]
                return
        raise AssertionError("it goes on saving")


@pytest.fixture
def index(tmp_path: Path) -> Iterator[IndexProcess]:
    process = IndexProcess(tmp_path / "state")
    yield process
    process.close()


@pytest.fixture
def engines() -> Iterator[list[KvPublisher]]:
    made = [KvPublisher(), KvPublisher()]
    yield made
    for engine in made:
        engine.close()


def store(engine: KvPublisher, *numbers: int) -> None:
    """Blocks of TOKENS, named by their numbers from 1 on."""
    for number in numbers:
        tokens = TOKENS[(number - 1) * BLOCK : number * BLOCK]
        engine.stored([number], tokens, BLOCK, parent=number - 1 or None)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL], ids=["stopped", "killed"])
def test_the_next_process_knows_what_is_cached_and_what_happened_meanwhile(
    index: IndexProcess, engines: list[KvPublisher], signum: int
) -> None:
    busy, calm = engines
    store(busy, 1, 1, 2, 3)  # the first block has two copies
    store(calm, 1, 2)
    index.start(interval_s=0.1 if signum == signal.SIGKILL else 3600.0)
    index.register(busy, "busy")
    index.register(calm, "calm")
    wait_for(lambda: index.matched() == {"busy": 3, "calm": 2})
    if signum == signal.SIGKILL:
        index.wait_until_saved()
    index.stop(signum)
    store(busy, 4, 5)
    busy.removed([1])
    calm.removed([2])

    index.start()
    wait_for(lambda: index.matched() == {"busy": 5, "calm": 1})
    wait_for(lambda: [each["state"] for each in index.streams().values()] == ["warm", "warm"])
    assert {name: each["batches"] for name, each in index.streams().items()} == {"busy": 3, "calm": 1}
    assert index.streams()["busy"]["unresolved_blocks"] == 0
    busy.removed([1])  # the other copy
    wait_for(lambda: index.matched()["busy"] == 0)


@pytest.mark.extended
def test_it_answers_before_anybody_registers_again_and_also_without_its_engines(
    index: IndexProcess, engines: list[KvPublisher]
) -> None:
    store(engines[0], 1, 2, 3)
    index.start()
    index.register(engines[0], "engine")
    index.register(engines[1], "gone")
    index.post("/unregister", {"instance_id": "gone"})
    wait_for(lambda: index.matched() == {"engine": 3})
    index.stop()
    engines[0].close()
    index.start()
    assert index.matched() == {"engine": 3}
    assert [each["instance_id"] for each in index.get("/instances").json()["instances"]] == ["engine"]
    assert index.streams()["engine"]["state"] == "connecting"


@pytest.mark.extended
def test_an_engine_that_restarted_meanwhile_has_only_new_content(
    index: IndexProcess, engines: list[KvPublisher]
) -> None:
    store(engines[0], 1, 2, 3)
    store(engines[1], 1, 2)
    index.start()
    for number, engine in enumerate(engines):
        index.register(engine, f"engine-{number}")
    wait_for(lambda: index.matched() == {"engine-0": 3, "engine-1": 2})
    index.stop()
    engines[0].close()
    engines[0] = KvPublisher(like=engines[0])
    store(engines[0], 1)
    index.start()
    wait_for(lambda: index.matched() == {"engine-0": 1, "engine-1": 2})
    store(engines[0], 2)
    wait_for(lambda: index.matched() == {"engine-0": 2, "engine-1": 2})


@pytest.mark.extended
@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"KVINDEX\n\x01\0\0\0" + bytes(100), "older than 2"),
        (b"#!/bin/sh\necho something else\n", "not a snapshot of a cache index"),
        (None, "checksum"),
    ],
    ids=["older", "foreign", "corrupt"],
)
def test_a_bad_file_is_named_and_the_index_starts_empty(
    index: IndexProcess, engines: list[KvPublisher], content: bytes | None, reason: str
) -> None:
    store(engines[0], 1, 2, 3)
    index.start()
    index.register(engines[0], "engine")
    wait_for(lambda: index.matched() == {"engine": 3})
    index.stop()
    path = index.folder / "index-snapshot"
    if content is None:
        damaged = bytearray(path.read_bytes())
        damaged[len(damaged) // 2] ^= 1
        content = bytes(damaged)
    path.write_bytes(content)
    index.start()
    wait_for(lambda: index.matched() == {"engine": 3})  # all of it by replay
    assert index.streams()["engine"]["batches"] == 3
    index.stop()
    assert reason in index.log.read_text()
    index.start()
    wait_for(lambda: index.streams()["engine"]["state"] == "warm")
    assert index.streams()["engine"]["batches"] == 0


def test_a_file_that_cannot_be_written_is_counted(index: IndexProcess, engines: list[KvPublisher]) -> None:
    (index.folder / ".index-snapshot.unfinished").mkdir()
    store(engines[0], 1)
    index.start()
    index.register(engines[0], "engine")
    wait_for(lambda: index.metric("conductor_index_snapshot_failures_total") > 0)
    assert index.metric("conductor_index_snapshots_total") == 0
    assert index.matched() == {"engine": 1}
    index.stop()
    assert "cannot be saved" in index.log.read_text()
