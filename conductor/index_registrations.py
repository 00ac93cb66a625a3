"""Who was registered with an index service, kept so that a restarted one needs no new registrations."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import orjson
import structlog
from pydantic import ValidationError

from conductor.indexer import Registration
from conductor.state_store import StateStore

_log = structlog.get_logger(__name__)

_KEY = "index-registrations"


class RegistrationBook:
    """The registrations in a state store, written whole with every change."""

    def __init__(self, store: StateStore) -> None:
        self._store = store
        self._restoring = False
        # by identity; a cluster that registers rank by rank writes all of them each time
        self._encoded: dict[int, tuple[Registration, bytes]] = {}
        self.failures = 0

    def restore(self, register: Callable[[Registration], None]) -> None:
        """Register those of the last run again, before there are others."""
        self._restoring = True
        for each in self._read():
            register(each)
        self._restoring = False

    def _read(self) -> list[Registration]:
        """Empty when they cannot be read; why is in the log."""
        saved = self._store.get(_KEY)
        try:
            entries = [] if saved is None else orjson.loads(saved)
            if not isinstance(entries, list):
                raise TypeError(f"expected a list, got {type(entries).__name__}")
            return [Registration.model_validate(entry) for entry in entries]
        except (orjson.JSONDecodeError, ValidationError, TypeError) as error:
            _log.warning("saved registrations are ignored; register again", reason=str(error))
            return []

    def save(self, registrations: Iterable[Registration]) -> None:
        """Replace what is saved. A failure is logged and counted: these then end with the process."""
        if self._restoring:
            return
        known, self._encoded = self._encoded, {}
        for each in registrations:
            self._encoded[id(each)] = known.get(id(each)) or (each, each.model_dump_json().encode())
        try:
            self._store.put(_KEY, b"[" + b",\n".join(text for _, text in self._encoded.values()) + b"]")
        except OSError as error:
            self.failures += 1
            _log.error("registrations cannot be saved", reason=str(error))
