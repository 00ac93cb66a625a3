"""Asking Mooncake masters for the keys they have: once connected, after a gap, and then slowly forever.

``GET /get_all_keys`` of the master's admin port lists one key a line; ``GET /kv_events/status`` tells whether
it was built with events at all.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Protocol

import httpx
import structlog

from cache_index.mooncake_hints import Listing, MooncakeHints, name_of

log = structlog.get_logger(__name__)

TIMEOUT_S = 10.0  # without a byte
AT_LEAST_S = 1.0  # between two listings, whatever happens
NAMES_AT_ONCE = 512  # compared under the lock, so that events and statistics wait a millisecond at most
TICK_S = 0.5  # how long something due may wait
CLOSE_S = 2.0  # a master that does not answer holds nobody up


class ListedPool(Protocol):
    """A pool whose master is asked."""

    hints: MooncakeHints
    admin_endpoint: str | None
    reconcile_s: float
    listing_due_s: float

    def listed(self, listing: Listing) -> None:
        """A listing was compared to its end."""


class MasterListings:
    """One thread that asks the masters of all pools in turn."""

    def __init__(
        self, pools: Callable[[], Iterable[ListedPool]], lock: threading.RLock, clock: Callable[[], float]
    ) -> None:
        self._pools = pools
        self._lock = lock
        self._clock = clock
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._warned: set[str] = set()

    def start(self) -> None:
        if self._thread is None and not self._closed.is_set():
            self._thread = threading.Thread(target=self._run, name="mooncake-listings", daemon=True)
            self._thread.start()

    def close(self) -> None:
        self._closed.set()
        if self._thread is not None:
            self._thread.join(CLOSE_S)

    def _run(self) -> None:
        with httpx.Client(timeout=TIMEOUT_S, trust_env=False) as client:
            while not self._closed.wait(TICK_S):
                for pool in self._due():
                    try:
                        self._list(client, pool)
                    except Exception:  # a fault of ours must not end the listings of other pools
                        log.exception("mooncake_listing.failed", url=pool.admin_endpoint)

    def _due(self) -> list[ListedPool]:
        with self._lock:
            now_s = self._clock()
            return [pool for pool in self._pools() if pool.admin_endpoint and pool.listing_due_s <= now_s]

    def _list(self, client: httpx.Client, pool: ListedPool) -> None:
        with self._lock:
            if pool not in self._pools():  # removed meanwhile
                return
            listing = pool.hints.begin_listing()
            pool.listing_due_s = self._clock() + max(pool.reconcile_s, AT_LEAST_S)
        url = pool.admin_endpoint or ""
        try:
            response = client.get(f"{url}/get_all_keys")
            response.raise_for_status()
            self._warn_without_events(client, url)
        except (httpx.HTTPError, ValueError) as error:
            if url not in self._warned:
                self._warned.add(url)
                log.warning(
                    "mooncake_listing.failed", url=url, reason=f"{type(error).__name__}: {error}"[:200]
                )
            return
        present = {name for key in response.text.splitlines() if (name := name_of(key)) is not None}
        self._compare(pool, listing, present)

    def _compare(self, pool: ListedPool, listing: Listing, present: set[int]) -> None:
        with self._lock:
            known = pool.hints.names()
        for names in _slices(name for name in known if name not in present):
            with self._lock:
                pool.hints.drop_unlisted(names, listing)
        for names in _slices(present):
            with self._lock:
                pool.hints.learn_listed(names, listing)
        with self._lock:
            pool.listed(listing)

    def _warn_without_events(self, client: httpx.Client, url: str) -> None:
        """Masters accept the switch for events even when they were built without them."""
        if url in self._warned:
            return
        self._warned.add(url)
        response = client.get(f"{url}/kv_events/status")
        if response.status_code == 200 and response.json().get("enabled") is False:
            log.warning(
                "mooncake_listing.no_events",
                url=url,
                remedy="this master publishes no KV events, so the pool is known from listings alone; "
                "use a build with KV events and --enable_kv_events=true",
            )


def _slices(names: Iterable[int]) -> Iterator[list[int]]:
    rest = iter(names)
    while some := list(islice(rest, NAMES_AT_ONCE)):
        yield some
