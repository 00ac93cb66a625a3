"""Copy and move tasks of a Mooncake store, which only its own client library can create.

A task is carried out by the source's client, which asks the master for work once a second and takes 16 tasks
at most: a background affair. Works with `mooncake-transfer-engine` 0.3.13 (the extra `mooncake`).
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Sequence
from typing import Any, Protocol

from conductor.actions import ExecutionError

AT_ONCE = 64  # tasks created and not ended
POLL_S = 0.1
_CLIENT_BUFFER_BYTES = 16 << 20
_NOT_FOUND = -704
_ENDED = {"SUCCESS": True, "FAILED": False}


class ObjectCopies(Protocol):
    """Copies objects between segments of a store. Blocks; called from worker threads."""

    def carry_out(self, keys: Sequence[str], source: str | None, target: str, stop: threading.Event) -> int:
        """Copy, or with a ``source`` move, to ``target``; how many of the first keys without a gap are there.

        Ends early when ``stop`` is set. Raises ExecutionError when the store takes no tasks.
        """
        ...


class MooncakeClient:
    """A client of a store that holds nothing itself. It listens on a port of its own for the transfer engine.

    Raises ExecutionError, retryable, when the master cannot be reached, and ImportError without the library.
    """

    def __init__(
        self, master: str, *, host: str = "127.0.0.1", protocol: str = "tcp", device: str = ""
    ) -> None:
        self._master, self._host, self._protocol, self._device = master, host, protocol, device
        self._library = importlib.import_module("mooncake.store")
        self._store: Any = None
        self._lock = threading.Lock()

    def carry_out(self, keys: Sequence[str], source: str | None, target: str, stop: threading.Event) -> int:
        store = self._connected()
        states: list[bool | None] = []  # of the keys whose task was created; None while it runs
        tasks: dict[int, Any] = {}
        while not stop.is_set():
            while len(states) < len(keys) and len(tasks) < AT_ONCE and False not in states:
                created = self._create(store, keys[len(states)], source, target)
                if created is not None:
                    tasks[len(states)] = created
                states.append(False if created is None else None)
            for position in list(tasks):
                ended = self._ended(store, tasks[position])
                if ended is not None:
                    states[position] = ended
                    del tasks[position]
            if not tasks and (len(states) == len(keys) or False in states):
                break
            stop.wait(POLL_S)
        return next((i for i, state in enumerate(states) if state is not True), len(states))

    def close(self) -> None:
        with self._lock:
            if self._store is not None:
                self._store.close()
                self._store = None

    def _connected(self) -> Any:
        with self._lock:
            if self._store is None:
                store = self._library.MooncakeDistributedStore()
                code = store.setup(
                    self._host,
                    "P2PHANDSHAKE",
                    0,
                    _CLIENT_BUFFER_BYTES,
                    self._protocol,
                    self._device,
                    self._master,
                )
                if code != 0:
                    raise ExecutionError(
                        f"no connection to the Mooncake master {self._master} (error {code})", retryable=True
                    )
                self._store = store
            return self._store

    def _create(self, store: Any, key: str, source: str | None, target: str) -> Any | None:
        """None when the object is gone."""
        if source is None:
            task, code = store.create_copy_task(key, [target])
        else:
            task, code = store.create_move_task(key, source, target)
        if code == _NOT_FOUND:
            return None
        if code != 0:
            raise ExecutionError(f"the Mooncake master takes no task for {key} to {target} (error {code})")
        return task

    @staticmethod
    def _ended(store: Any, task: Any) -> bool | None:
        answer, code = store.query_task(task)
        return False if code != 0 or answer is None else _ENDED.get(answer.status.name)
