"""A Redis server of a test's own, on a free port and in a folder of its own."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis
from front_door_process import free_port

SERVER = shutil.which("redis-server")
needs_redis = pytest.mark.skipif(
    SERVER is None, reason="redis-server is not installed: make redis (Debian: apt-get install redis-server)"
)
PASSWORD = "a-word-of-tests"


class RedisProcess:
    """Can be stopped in every way that a server can be; it keeps nothing over a restart."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self.url = f"redis://:{PASSWORD}@127.0.0.1:{self.port}/0"
        self._folder = folder
        self._process: subprocess.Popen[bytes]
        self.start()

    def start(self) -> None:
        assert SERVER is not None
        self._process = subprocess.Popen(
            (
                SERVER, "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no",
                "--dir", str(self._folder), "--requirepass", PASSWORD, "--loglevel", "warning",
            ),
            stdout=subprocess.DEVNULL,
        )  # fmt: skip
        deadline_s = time.monotonic() + 20.0
        while True:
            try:
                with self.client() as client:
                    client.ping()
                return
            except redis.ConnectionError:
                assert time.monotonic() < deadline_s, "redis-server did not start"
                time.sleep(0.02)

    def client(self) -> redis.Redis:
        return redis.Redis.from_url(self.url, socket_timeout=5.0)

    def flush(self) -> None:
        with self.client() as client:
            client.flushall()

    def pause(self) -> None:
        os.kill(self._process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self._process.pid, signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        if self._process.poll() is None:
            self.resume()
            self.kill()


@contextmanager
def redis_process(folder: Path) -> Iterator[RedisProcess]:
    folder.mkdir(parents=True, exist_ok=True)
    server = RedisProcess(folder)
    try:
        yield server
    finally:
        server.close()
