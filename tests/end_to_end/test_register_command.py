"""`conductor register` that is ended at an awkward moment."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from front_door_process import conductor_command


class SlowConductor:
    """Registers an instance, and answers that much later; another one is refused at once."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.put = threading.Event()
        self.go = threading.Event()
        told = self

        class Handler(BaseHTTPRequestHandler):
            def do_PUT(self) -> None:
                told.asked.append("PUT")
                told.put.set()
                told.go.wait(30)
                self._answer(201)

            def do_DELETE(self) -> None:
                told.asked.append("DELETE")
                self._answer(404)

            def _answer(self, status: int) -> None:
                self.rfile.read(int(self.headers.get("content-length") or 0))
                self.send_response(status)
                self.send_header("content-length", "2")
                self.end_headers()
                with contextlib.suppress(ConnectionError):  # it has left
                    self.wfile.write(b"{}")

            def log_message(self, *arguments: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"


@pytest.fixture
def conductor() -> Iterator[SlowConductor]:
    slow = SlowConductor()
    thread = threading.Thread(target=slow.server.serve_forever)
    thread.start()
    yield slow
    slow.go.set()
    slow.server.shutdown()
    thread.join()
    slow.server.server_close()


def test_an_engine_that_ends_while_it_registers_leaves(conductor: SlowConductor, tmp_path: Path) -> None:
    """The conductor has it by then, and would send it requests until its time to live is over."""
    with (tmp_path / "log").open("wb") as log:
        sidecar = subprocess.Popen(
            conductor_command("register", "e", "http://127.0.0.1:1", "--url", conductor.url, "--ttl-s", "60"),
            stdout=log,
            stderr=log,
        )
    try:
        assert conductor.put.wait(30), (tmp_path / "log").read_text()
        sidecar.send_signal(signal.SIGTERM)
        assert sidecar.wait(timeout=30) == 0
    finally:
        sidecar.kill()
        sidecar.wait()
    assert conductor.asked == ["PUT", "DELETE"]
