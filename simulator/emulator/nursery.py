"""Emulated engines forked from one process that has imported what they all need, which takes seconds each.

Orders come on standard input, reports go to standard output, a JSON object a line: an order has a ``name`` and the
``arguments`` of `simulator.emulator`; a report has the name, and the ``pid`` of the engine that began, or the
``code`` with which it ended. The nursery ends with its input, and the engines, whose parent it is, end with it.
"""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson

from simulator.emulator.__main__ import main as run_engine

_READ_BYTES = 65_536


def main() -> None:
    ended_read, ended_write = os.pipe()
    os.set_blocking(ended_write, False)
    signal.set_wakeup_fd(ended_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)  # without a handler nothing is written
    names: dict[int, str] = {}
    orders = b""
    while True:
        ready, _, _ = select.select((sys.stdin.fileno(), ended_read), (), ())
        if ended_read in ready:
            os.read(ended_read, _READ_BYTES)
            _report_ended(names)
        if sys.stdin.fileno() in ready:
            data = os.read(sys.stdin.fileno(), _READ_BYTES)
            if not data:
                return
            *lines, orders = (orders + data).split(b"\n")
            for line in lines:
                order = orjson.loads(line)
                pid = _begun(order["name"], order["arguments"])
                names[pid] = order["name"]
                _report({"name": order["name"], "pid": pid})


def _begun(name: str, arguments: Sequence[str]) -> int:
    """The process id of a new engine, which is in a session of its own and goes by its name."""
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    code: Any = 1
    try:
        os.setsid()
        Path("/proc/self/comm").write_text(
            name
        )  # as `ps -o comm` and `top` show it, at most 15 characters of it
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.dup2(2, 1)
        run_engine([*arguments, "--parent-pid", str(parent)])
    except SystemExit as end:
        code = end.code
    finally:
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1)


def _report_ended(names: dict[int, str]) -> None:
    while names:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        _report({"name": names.pop(pid), "code": os.waitstatus_to_exitcode(status)})


def _report(what: dict[str, Any]) -> None:
    os.write(sys.stdout.fileno(), orjson.dumps(what) + b"\n")


if __name__ == "__main__":
    main()
